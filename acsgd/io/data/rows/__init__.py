"""Rows: the samples of a corpus, each of one fixed size, and the tensors of micro-batches made of them."""
