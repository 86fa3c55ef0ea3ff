"""Drop-ins for SDKs that people use already. Each is a module of its own, and needs its SDK."""
