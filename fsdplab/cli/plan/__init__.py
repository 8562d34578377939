"""`fsdplab plan`: predictions of a training job, nothing is run; begin in commands.py."""
