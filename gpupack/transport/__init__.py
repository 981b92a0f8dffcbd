"""Frames over zmq: a sender that never loses one unsaid, a receiver that never goes on with a hole."""
