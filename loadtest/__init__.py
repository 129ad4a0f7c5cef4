"""The load test: a client of the wire contract that measures a running server from outside.

It owns what is sent, when, and what is counted. The command line calls it, and the service's own benchmarks
do. It never imports the service, so that it sees what any client sees. Every latency counts from the moment
a request was due, and the same seed sends the same requests. README.md says what each figure means.
"""
