//! Addresses of storage, and what they name.

use super::Place;
use super::cloud::Objects;

impl Place {
    /// The place that an address names, or why it names none. Makes no request.
    pub(super) fn open(address: &str) -> Result<Self, String> {
        if address.is_empty() {
            return Err("an empty address; it must be a path or s3://, gs:// or az://".into());
        }
        let (scheme, rest) = match scheme(address) {
            None => return local(address),
            Some(("file", path)) if path.starts_with('/') => return local(path),
            Some(("file", _)) => return Err("file:// must be followed by an absolute path".into()),
            Some(found) => found,
        };
        if !STORES.contains(&scheme) {
            let reason = "not a storage address; it must be a path or s3://, gs:// or az://";
            return Err(reason.into());
        }
        Objects::open(scheme, rest).map(Self::Store)
    }
}

fn local(path: &str) -> Result<Place, String> {
    crate::paths::absolute(path).map(Place::Local).map_err(|error| error.to_string())
}

/// The scheme of an address, and what follows `://`; `None` for a path.
pub(super) fn scheme(address: &str) -> Option<(&str, &str)> {
    let (scheme, rest) = address.split_once("://")?;
    let is_scheme = scheme.starts_with(|c: char| c.is_ascii_alphabetic())
        && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c));
    is_scheme.then_some((scheme, rest))
}

/// Schemes of object stores.
const STORES: [&str; 8] = ["abfs", "abfss", "adl", "az", "azure", "gs", "s3", "s3a"];
