"""What codecs of the host tier cost in quality, against the bytes that they save."""
