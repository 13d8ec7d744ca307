"""The compiled CPU core: C sources, their build, and the calls into them."""
