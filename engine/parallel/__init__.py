"""One model on several devices: what a rank needs of its peers, their processes, and how plans reach them."""
