//! Finds the samples of a tar file.

use std::io::{self, Read, Seek};

use tar::{Archive, EntryType};

/// Consecutive members of a tar file with the same key.
#[derive(Debug)]
pub(super) struct Sample {
    /// The path up to the first dot of the file's name.
    pub(super) key: String,
    /// For each requested member, where it is; `None` if the sample lacks it.
    pub(super) parts: Vec<Option<Part>>,
}

/// Where the content of a member is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    /// First byte in the tar file.
    pub(super) start: u64,
    /// Number of bytes.
    pub(super) bytes: u64,
}

/// Why the samples of a file cannot be found.
pub(super) enum FindError {
    Io(io::Error),
    Malformed(String),
}

/// Finds the samples of a tar file of `length` bytes. `requested`: the extensions that each
/// requested member may have.
pub(super) fn find(
    source: impl Read + Seek,
    length: u64,
    requested: &[&[String]],
) -> Result<Vec<Sample>, FindError> {
    let mut archive = Archive::new(source);
    let mut samples: Vec<Sample> = Vec::new();
    for entry in archive.entries_with_seek().map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let path = entry.path_bytes();
        let path = String::from_utf8_lossy(&path);
        let kind = entry.header().entry_type();
        // Links, folders and the like contain nothing.
        if !matches!(kind, EntryType::Regular | EntryType::Continuous) {
            continue;
        }
        let folder = path.rfind('/').map_or(0, |slash| slash + 1);
        let Some(dot) = path[folder..].find('.').filter(|dot| *dot > 0) else { continue };
        let (key, extension) = (&path[..folder + dot], path[folder + dot + 1..].to_lowercase());
        let part = Part { start: entry.raw_file_position(), bytes: entry.size() };
        if part.start.checked_add(part.bytes).is_none_or(|end| end > length) {
            let reason = format!("member {path:?} is cut off: the file has {length} bytes");
            return Err(FindError::Malformed(reason));
        }
        if samples.last().is_none_or(|last| last.key != key) {
            let parts = vec![None; requested.len()];
            samples.push(Sample { key: key.to_owned(), parts });
        }
        let sample = samples.last_mut().expect("a sample was added");
        for (place, extensions) in sample.parts.iter_mut().zip(requested) {
            if extensions.contains(&extension) && place.replace(part).is_some() {
                let reason = format!("sample {key:?} has two members {:?}", extensions.join(";"));
                return Err(FindError::Malformed(reason));
            }
        }
    }
    // Members that were not requested do not make a sample.
    samples.retain(|sample| sample.parts.iter().any(Option::is_some) || requested.is_empty());
    Ok(samples)
}

/// An error of the source contains a complete error of its own, or one of the operating system.
fn failed(error: io::Error) -> FindError {
    let is_source = error.raw_os_error().is_some()
        || error.get_ref().is_some_and(|source| source.is::<crate::reader::DataError>());
    if is_source {
        return FindError::Io(error);
    }
    FindError::Malformed(format!("not a readable tar file; decompress it first, if it is: {error}"))
}
