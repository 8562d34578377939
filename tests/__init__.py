"""The tests: real ranks, real processes, real traces."""
