//! Versions of files, and listings of them.

/// The files below a folder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Listing {
    /// Paths relative to the folder, in ascending order, with the version of each file.
    pub(crate) files: Vec<(String, Version)>,
    /// The objects whose keys can't be read (see the module's documentation).
    pub(crate) left_out: Vec<String>,
}

/// Version of a file: changes whenever the file is written again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Version {
    /// Length of the file, in bytes.
    pub(crate) bytes: u64,
    /// ETag of the content, or the time of the last modification.
    pub(crate) tag: String,
}
