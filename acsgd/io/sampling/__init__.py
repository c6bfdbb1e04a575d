"""From tokenized sources to the batches of one replica."""
