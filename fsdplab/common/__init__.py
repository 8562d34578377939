"""What several folders need, with the standard library alone: names of strategies and of memory's categories, files
written whole, near words, sizes, process endings. Everything may import it.
"""
