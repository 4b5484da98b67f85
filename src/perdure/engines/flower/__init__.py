"""A real federation: the same loop, methods and results; the clients are other machines.

- wire.py       orders to nodes and their replies, as bytes
- engine.py     the engine: sends orders, checks replies
- node.py       what a node does with an order
- versions.py   what a node keeps, by its place in the run
- local.py      a node's own data, one folder or file a task
- remote.py     the stream as the server sees it, which holds no data
- apps.py       Flower's ServerApp and ClientApp (needs the extra `flower`)
- link.py       Flower's executables: processes, ports, environment
- keys.py       certificates and keys
- submission.py runs that were handed in, and the app that Flower carries
- trial.py      a whole federation on one machine
"""
