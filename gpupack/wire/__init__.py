"""The wire: frames as `docs/wire.md` describes them, byte for byte. Works without zmq."""
