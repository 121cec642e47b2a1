"""Everything that touches TensorFlow's and Horovod's runtime. What is private of TensorFlow is in `tf_private` only."""
