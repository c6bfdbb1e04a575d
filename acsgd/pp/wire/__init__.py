"""The wire between two pipeline ranks: links, frames, coders, and the activation caches of delta codecs."""
