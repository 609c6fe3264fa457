"""``python -m example_project.fleet_demo``: callers go on while servers are killed and stopped.

Four servers sell tickets; each is a process with its own address, which it registers. Callers find
the servers in the registry, and balance their calls in three ways. Then one server is killed, and
one is stopped, while callers that fail over go on beside callers that do not. Then all callers want
seats at one show: the servers forward these commands to the server that leads it. Then the leader
is killed.

Each answer names the server that gave it, and the demo draws a picture of that. At the end the demo
compares the sold tickets with the answers. Exit code 0 only if no caller that fails over saw an
error, and no seat was sold twice or was lost.
"""
