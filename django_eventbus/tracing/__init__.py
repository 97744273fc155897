"""The spans of the engine. A tracing library is needed only to record them."""
