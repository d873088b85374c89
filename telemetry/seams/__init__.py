"""All that touches names of torch and of other libraries that are private or patched."""
