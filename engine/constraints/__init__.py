"""Which tokens an answer may go on with: allowed ids, forbidden sequences, grammars. Ids in, bits out: no torch, no
sockets, no scheduler.
"""
