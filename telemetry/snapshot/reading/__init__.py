"""What `snapshot.trace` is made of: the stream, the events kept of it, and the figures taken from them."""
