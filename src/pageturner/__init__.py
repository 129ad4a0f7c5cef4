"""Pageturner: text generation over gRPC from a paged KV cache, with interchangeable scheduling policies.

The packages are links to the folders of the repository's root. They are imported below this name because
PyPI's `kernels` is a package that `transformers` imports: a bare `kernels` on the path would take its place.
"""

__version__ = "0.1.0"
