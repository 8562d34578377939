"""The GPU path over a stand-in for the driver of NVIDIA: README.md says how."""
