"""What PyTorch's API and the libraries around it ask for; begin in torch_interop.py.

Collectives that the user supplies, and the state that pipelining and accelerate read.
"""
