"""The engines of this process: started once for each configuration, on an event loop of their own."""
