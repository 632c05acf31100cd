"""OpenVINO GenAI as a peer: an environment of its own, a checkpoint converted in it, and a worker process that stays
loaded between rounds. Nothing of it is ever imported by this process.
"""
