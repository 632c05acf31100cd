"""Whether a run may be quoted: each thing that can spoil it, its limit, and the verdict."""
