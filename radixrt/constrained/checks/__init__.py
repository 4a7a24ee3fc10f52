"""Values that no grammar covers: found in the growing answer, validated, taken back and tried again."""
