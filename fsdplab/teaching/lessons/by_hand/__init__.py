"""What notebooks 03 and 04 share: a small GPT trained in several ways, each beside an unsharded twin."""
