"""A plotly figure as an SVG picture without a browser: for saved notebooks, readers without scripts, printed pages.

One renderer of our own serves best here: one file draws every figure of this package in at most tens of kB, and marks
that it lacks are added with the figure that needs them. plotly's own export (kaleido) would be exact for any figure,
but it starts a Chrome, hundreds of MB that machines which run the lessons need not have. matplotlib is a large
dependency too, and every figure would have to be drawn a second time in its terms, so that the two could disagree.
"""
