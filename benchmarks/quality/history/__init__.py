"""What bounded histories cost a real model: by place in the text, and of facts by how long ago they were told."""
