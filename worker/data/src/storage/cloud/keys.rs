//! Keys of objects.

use object_store::path::{Path, PathPart};

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
