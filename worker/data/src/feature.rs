//! Features that a program was built without.

/// Why this program cannot use `what`, which a feature of the crate `elasticdl`, or of its Python
/// package, adds.
pub(crate) fn missing(what: &str, feature: &str) -> String {
    format!(
        "this program was built without {what}; run `cargo add elasticdl --features {feature}` \
         and build it again; for a program in Python, install the package with `pip install -C \
         build-args=--features=cloud,parquet`"
    )
}
