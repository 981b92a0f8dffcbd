"""Packer: the life of requests and steps over one backend."""
