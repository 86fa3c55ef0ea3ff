"""The demo: a conversation written for it, replayed as a stateless service would."""
