"""A real federation: the same loop, methods and results; the clients are other machines.

What travels and who answers: wire (orders and replies as bytes), engine (the server's side), node
(what a node does with an order), apps (Flower's two apps, which connect them), lead (a whole run).

What stays on a node: local (its data), versions (what its clients keep), masks (its secrets).

What is agreed and set up: agreed (classes, shape), keys, folders and setup (a new federation),
submission (runs that were handed in), trial (a whole federation on one machine).

Processes: processes and guard (children that end with us), flwr_calls, server, nodes, executor
(which serves a node's orders by forks).
"""
