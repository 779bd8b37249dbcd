//! The parts of an address: its scheme, and the key of an object.

use object_store::path::{Path, PathPart};

/// The scheme of an address, and what follows `://`; `None` for a path.
pub(super) fn scheme(address: &str) -> Option<(&str, &str)> {
    let (scheme, rest) = address.split_once("://")?;
    let is_scheme = scheme.starts_with(|c: char| c.is_ascii_alphabetic())
        && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c));
    is_scheme.then_some((scheme, rest))
}

/// The key that is written `text`, which may end with a slash.
pub(super) fn parse_key(text: &str) -> Result<Path, String> {
    let text = text.strip_suffix('/').unwrap_or(text);
    match Path::parse(text) {
        Ok(key) if key.as_ref() == text => Ok(key),
        _ => Err(format!(
            "{text:?} is not a key that can be used: it has an empty component, a component `.` \
             or `..`, or a control character; rename the object"
        )),
    }
}

/// The key at `path` below `root`. Characters of keys are not encoded.
pub(super) fn below(root: &Path, path: &str) -> Path {
    let parts = path.split('/').filter(|part| !part.is_empty());
    parts.fold(root.clone(), |at, part| {
        at.join(PathPart::parse(part).unwrap_or_else(|_| PathPart::from(part)))
    })
}
