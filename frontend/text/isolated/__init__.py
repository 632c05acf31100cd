"""Killable worker processes for jobs of unpredictable cost, with limits on time and memory.

pool.py     the processes of one kind of job: starts, reuses and replaces them
process.py  one process, as the parent sees it: start, request, kill
worker.py   the process itself: reads jobs, sets limits, answers
"""
