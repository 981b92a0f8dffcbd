"""The device backend of the plugin: packs on the engine's own stream."""
