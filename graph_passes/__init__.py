"""GraphDef-to-GraphDef passes: plain protobuf data in, the same data changed out, no TensorFlow runtime.

`graph` holds the view every pass works through, `analysis` reads, the passes change, `manager` runs and verifies.
"""
