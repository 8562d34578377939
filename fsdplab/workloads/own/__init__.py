"""Models of one's own: a Python file, a folder of Hugging Face, or functions and classes of a notebook.

`sources` tells what a `--model` is, without torch; `value` is the workload, `reading` makes one of a file, `carried`
brings one of a notebook to ranks, and `hugging_face` makes one of a config.json.
"""
