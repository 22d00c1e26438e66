"""The policies that are built, by the name that manifests use."""
