"""Parts of the fused depth-attention operator; `attnres.depth_attention` puts them behind the four verbs."""
