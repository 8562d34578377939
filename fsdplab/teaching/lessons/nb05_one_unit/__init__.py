"""Notebook 05: one layer, sharded with five functions of the learner's own."""
