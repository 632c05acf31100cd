"""Worker processes for jobs whose cost nobody can foretell: each has a limit of time and memory, and may be killed.

pool.py     the processes of one kind of job: starts, reuses and replaces them
process.py  one process from outside: started, asked, killed
worker.py   the inside of a process: reads jobs, sets the limits, answers
"""
