//! File access through one interface: a local folder or an object store, selected by the address.
//!
//! | address | storage | settings, from the environment |
//! |---|---|---|
//! | a path, `file:///path` | a local folder or file | |
//! | `s3://bucket/path` | S3, or a compatible store | `AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT`, … |
//! | `gs://bucket/path` | Google Cloud Storage | `GOOGLE_SERVICE_ACCOUNT`, … |
//! | `az://container/path` | Azure Blob Storage | `AZURE_STORAGE_ACCOUNT_NAME`, … |
//!
//! An address is not a URL: what follows the bucket is the key, character by character, without a
//! query, a fragment or percent-encoding. Keys with an empty component, a component `.` or `..`, or
//! a control character are refused, and excluded from listings.
//!
//! Calls block, so they must be made from threads that may block. Requests run on a small runtime
//! of their own. Requests that fail with a transient error are retried (see `retry.rs`).

use std::error::Error;
use std::fmt;
use std::ops::Range;
use std::path::PathBuf;

use bytes::Bytes;

use self::cloud::Objects;
use self::errors::Failed;
pub(crate) use self::listing::{Listing, Version};
pub(crate) use self::retry::{Transient, with_retries, with_write_retries};

/// A folder of files. Paths given to its methods are relative to it and use `/` as the separator;
/// the empty path is the folder, or the file, itself.
#[derive(Clone, Debug)]
pub struct Storage {
    place: Place,
    address: String,
    /// Whether these are files that the job writes.
    is_output: bool,
}

/// Where the files are.
#[derive(Clone, Debug)]
enum Place {
    /// A path of this machine.
    Local(PathBuf),
    /// The objects below a key.
    Store(Objects),
}

/// A file in a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Found {
    /// Path, relative to the listed folder.
    pub path: String,
    /// Length of the file, in bytes.
    pub bytes: u64,
}

impl Found {
    #[doc(hidden)]
    #[must_use]
    pub fn new(path: String, bytes: u64) -> Self {
        Self { path, bytes }
    }
}

/// Why storage cannot be used, or what it refused. The text names the address and the file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StorageError {
    /// The address is not valid; the reason says what is expected.
    #[error("{address}: {reason}")]
    Address {
        /// Address, as it was given.
        address: String,
        /// What is wrong with the address.
        reason: String,
    },
    /// The file does not exist.
    #[error("{path}: no such file")]
    NotFound {
        /// Full address of the file.
        path: String,
    },
    /// The access failed or timed out; transient errors were retried before.
    #[error("{path}: {reason}", reason = errors::reason(&**source))]
    Store {
        /// Full address of the file.
        path: String,
        /// Error of the store, or of the operating system.
        source: Box<dyn Error + Send + Sync>,
    },
}

impl Storage {
    /// Opens the storage at `address`: a path, `file://`, `s3://`, `gs://` or `az://`. Makes no
    /// request yet. A folder that does not exist is created by the first write.
    ///
    /// # Errors
    /// The address is not valid, or settings that it needs are missing or wrong.
    pub fn open(address: &str) -> Result<Self, StorageError> {
        let wrong = |reason: String| StorageError::Address { address: address.to_owned(), reason };
        let place = Place::open(address).map_err(wrong)?;
        let address = match place {
            Place::Local(_) => address,
            Place::Store(..) => address.trim_end_matches('/'),
        };
        Ok(Self { place, address: address.to_owned(), is_output: false })
    }

    /// Files in `store` below `root`. `address`: name of this storage in errors.
    #[cfg(feature = "cloud")]
    #[doc(hidden)]
    pub fn within(
        store: std::sync::Arc<dyn object_store::ObjectStore>,
        root: object_store::path::Path,
        address: impl Into<String>,
    ) -> Self {
        let address = address.into();
        let place = Place::Store(Objects { store, bucket: (&*address).into(), key: root });
        Self { place, address, is_output: false }
    }

    /// Whether `address` is in an object store, not a path on this machine.
    #[must_use]
    #[doc(hidden)]
    pub fn is_remote(address: &str) -> bool {
        address::scheme(address).is_some_and(|(scheme, _)| scheme != "file")
    }

    /// Checks the key of an object's address.
    pub(crate) fn check_key(address: &str) -> Result<(), StorageError> {
        let rest = address::scheme(address).map_or(address, |(_, rest)| rest);
        let key = rest.split_once('/').map_or("", |(_, key)| key);
        let wrong = |reason| StorageError::Address { address: address.to_owned(), reason };
        cloud::check_key(key).map_err(wrong)
    }

    /// Address, as it was given.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The folder or file at `path` below this one.
    #[must_use]
    pub fn join(&self, path: &str) -> Self {
        Self { place: self.place.at(path), address: self.name(path), is_output: self.is_output }
    }

    /// The folder of this name in the same folder as this one.
    #[doc(hidden)]
    #[must_use]
    pub fn beside(&self, name: &str) -> Self {
        let address = self.name("..");
        Self { place: self.place.beside(name), address: format!("{address}/{name}"), ..*self }
    }

    /// The same files as outputs of the job. A read of them is repeated as a write is: not if it is
    /// refused, and not while the job stops.
    #[doc(hidden)]
    #[must_use]
    pub fn of_outputs(self) -> Self {
        Self { is_output: true, ..self }
    }

    /// Reads a whole file.
    ///
    /// # Errors
    /// [`StorageError::NotFound`], or an error of the store.
    pub fn read(&self, path: &str) -> Result<Bytes, StorageError> {
        match self.place.at(path) {
            Place::Local(at) => self.access(path, || std::fs::read(&at).map(Bytes::from)),
            Place::Store(at) => self.access(path, || at.read()),
        }
    }

    /// Reads bytes `range` of a file; fewer if the file ends before.
    ///
    /// # Errors
    /// See [`read`](Self::read). A range that begins at or after the file's end is an error.
    pub fn read_range(&self, path: &str, range: Range<u64>) -> Result<Bytes, StorageError> {
        match self.place.at(path) {
            Place::Local(at) => self.access(path, || local::read_range(&at, &range)),
            Place::Store(at) => self.access(path, || at.read_range(&range)),
        }
    }

    /// Fetches bytes `range` of this object, and the version that it has. Makes one attempt.
    pub(crate) fn fetch(&self, range: Range<u64>) -> Result<(Bytes, Version), StorageError> {
        self.object().fetch(range).map_err(|error| self.error("", error))
    }

    /// As [`fetch`](Self::fetch), without waiting for the reply, which `done` receives; `None` if
    /// there is none.
    pub(crate) fn fetch_in_background(
        &self,
        range: Range<u64>,
        done: impl FnOnce(Option<(Bytes, Version)>) + Send + 'static,
    ) {
        self.object().fetch_in_background(range, done);
    }

    fn object(&self) -> &Objects {
        match &self.place {
            Place::Local(_) => unreachable!("the files of this machine are not fetched"),
            Place::Store(at) => at,
        }
    }

    /// Returns the length of a file, in bytes.
    ///
    /// # Errors
    /// See [`read`](Self::read).
    pub fn bytes(&self, path: &str) -> Result<u64, StorageError> {
        self.version(path).map(|version| version.bytes)
    }

    /// Returns the current version of a file.
    pub(crate) fn version(&self, path: &str) -> Result<Version, StorageError> {
        match self.place.at(path) {
            Place::Local(at) => self.access(path, || local::version(&at)),
            Place::Store(at) => self.access(path, || at.version()),
        }
    }

    /// Lists all files below `path`, at any depth, in the order of their paths. Empty if there is
    /// no such folder.
    ///
    /// # Errors
    /// An error of the store.
    pub fn list(&self, path: &str) -> Result<Vec<Found>, StorageError> {
        let found = self.list_versions(path)?.files.into_iter();
        Ok(found.map(|(path, version)| Found { path, bytes: version.bytes }).collect())
    }

    /// Like [`list`](Self::list), with the version of each file.
    pub(crate) fn list_versions(&self, path: &str) -> Result<Listing, StorageError> {
        match self.place.at(path) {
            Place::Local(at) => self.access(path, || local::list(&at)),
            Place::Store(at) => self.listing(path, || at.list()),
        }
    }

    /// Lists the files in those folders of this one whose names begin with `prefix`. Other entries
    /// are not read, however many there are.
    ///
    /// # Errors
    /// An error of the store.
    #[doc(hidden)]
    pub fn list_folders(&self, prefix: &str) -> Result<Vec<Found>, StorageError> {
        let found = match &self.place {
            Place::Local(root) => return self.list_local_folders(root, prefix),
            Place::Store(at) => self.listing("", || at.list_folders(prefix))?,
        };
        let found = found.files.into_iter();
        Ok(found.map(|(path, version)| Found { path, bytes: version.bytes }).collect())
    }

    fn list_local_folders(
        &self,
        root: &std::path::Path,
        prefix: &str,
    ) -> Result<Vec<Found>, StorageError> {
        let mut found = Vec::new();
        for name in self.access("", || local::folders(root, prefix))? {
            let inside = self.list(&name)?.into_iter();
            found
                .extend(inside.map(|file| Found { path: format!("{name}/{}", file.path), ..file }));
        }
        found.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(found)
    }

    /// A listing of what is at `path`; empty, if nothing is.
    fn listing(
        &self,
        path: &str,
        list: impl FnMut() -> Result<Listing, Failed>,
    ) -> Result<Listing, StorageError> {
        match self.access(path, list) {
            Err(StorageError::NotFound { .. }) => Ok(Listing::default()),
            listed => listed,
        }
    }

    /// Writes a file atomically: all of `parts`, concatenated. On failure the previous content
    /// stays.
    ///
    /// Parts are not copied where the store accepts several buffers.
    ///
    /// # Errors
    /// An error of the store.
    pub fn write(&self, path: &str, parts: Vec<Bytes>) -> Result<(), StorageError> {
        match self.place.at(path) {
            Place::Local(at) => self.change(path, || local::write(&at, &parts)),
            Place::Store(at) => self.change(path, || at.write(&parts)),
        }
    }

    /// Copies this file to the address that has `suffix` after this one's. What is there is
    /// replaced.
    ///
    /// # Errors
    /// An error of the store.
    #[doc(hidden)]
    pub fn copy_beside(&self, suffix: &str) -> Result<(), StorageError> {
        match &self.place {
            Place::Local(at) => self.change("", || local::copy_beside(at, suffix)),
            Place::Store(at) => self.change("", || at.copy_beside(suffix)),
        }
    }

    /// Removes what writers of this file that were killed have left beside it. No other writer may
    /// be writing it. Object stores show no unfinished upload.
    ///
    /// # Errors
    /// An error of the file system.
    #[doc(hidden)]
    pub fn remove_unfinished(&self) -> Result<(), StorageError> {
        match &self.place {
            Place::Local(at) => self.change("", || local::remove_unfinished(at)),
            Place::Store(..) => Ok(()),
        }
    }

    /// Removes a file. A missing file is not an error.
    ///
    /// # Errors
    /// An error of the store.
    pub fn remove(&self, path: &str) -> Result<(), StorageError> {
        let removed = match self.place.at(path) {
            Place::Local(at) => self.change(path, || std::fs::remove_file(&at)),
            Place::Store(at) => self.change(path, || at.remove()),
        };
        match removed {
            Err(StorageError::NotFound { .. }) => Ok(()),
            other => other,
        }
    }

    /// Removes all files below `path`, `first` before the rest.
    ///
    /// # Errors
    /// An error of the store; some files may have been removed.
    #[doc(hidden)]
    pub fn remove_folder(&self, path: &str, first: &str) -> Result<(), StorageError> {
        self.remove(&format!("{path}/{first}"))?;
        for file in self.list(path)? {
            self.remove(&format!("{path}/{}", file.path))?;
        }
        if let Place::Local(folder) = self.place.at(path) {
            // The folder itself, and temporary files of unfinished writes, which no listing shows.
            drop(std::fs::remove_dir_all(folder));
        }
        Ok(())
    }

    /// Removes the folder at `path` if there is nothing in it, as a writer that has failed leaves
    /// it. Object stores have no folders.
    #[doc(hidden)]
    pub fn remove_if_empty(&self, path: &str) {
        if let Place::Local(folder) = self.place.at(path) {
            drop(std::fs::remove_dir(folder));
        }
    }

    fn name(&self, path: &str) -> String {
        match path {
            "" => self.address.clone(),
            path => format!("{}/{path}", self.address.trim_end_matches('/')),
        }
    }

    /// Changes files, with retries.
    fn change<T, E: Into<Failed>>(
        &self,
        path: &str,
        mut change: impl FnMut() -> Result<T, E>,
    ) -> Result<T, StorageError> {
        let change = || change().map_err(|error| self.error(path, error.into()));
        with_write_retries(&self.name(path), change)
    }

    /// Reads files, with retries.
    fn access<T, E: Into<Failed>>(
        &self,
        path: &str,
        mut access: impl FnMut() -> Result<T, E>,
    ) -> Result<T, StorageError> {
        let access = || access().map_err(|error| self.error(path, error.into()));
        match self.is_output {
            true => with_write_retries(&self.name(path), access),
            false => with_retries(&self.name(path), access),
        }
    }

    fn error(&self, path: &str, error: Failed) -> StorageError {
        match error {
            Failed::NotFound => StorageError::NotFound { path: self.name(path) },
            Failed::Other(source) => StorageError::Store { path: self.name(path), source },
        }
    }
}

impl Place {
    /// The folder or file at `path` below this one.
    fn at(&self, path: &str) -> Self {
        match self {
            Self::Local(root) => {
                let parts = path.split('/').filter(|part| !part.is_empty());
                Self::Local(parts.fold(root.clone(), |at, part| at.join(part)))
            }
            Self::Store(at) => Self::Store(at.below(path)),
        }
    }

    /// The folder `name` in the same folder as this one.
    fn beside(&self, name: &str) -> Self {
        match self {
            Self::Local(root) => Self::Local(root.join("..").join(name)),
            Self::Store(at) => Self::Store(at.beside(name)),
        }
    }
}

impl StorageError {
    /// Whether the same access may succeed later, without any change of it or of permissions.
    #[doc(hidden)]
    #[must_use]
    pub fn is_outage(&self) -> bool {
        self.is_transient()
    }

    /// The same error for another file, for which this one stood.
    #[doc(hidden)]
    #[must_use]
    pub fn renamed(self, name: &str) -> Self {
        match self {
            Self::Address { reason, .. } => Self::Address { address: name.into(), reason },
            Self::NotFound { .. } => Self::NotFound { path: name.into() },
            Self::Store { source, .. } => Self::Store { path: name.into(), source },
        }
    }
}

impl Transient for StorageError {
    fn is_transient(&self) -> bool {
        matches!(self, Self::Store { source, .. } if errors::is_transient(&**source))
    }

    fn is_refusal(&self) -> bool {
        matches!(self, Self::Store { source, .. } if errors::is_refusal(&**source))
    }
}

impl fmt::Display for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.address)
    }
}

mod address;
#[cfg(feature = "cloud")]
mod cloud;
#[cfg(not(feature = "cloud"))]
#[path = "storage/no_cloud.rs"]
mod cloud;
mod errors;
mod listing;
mod local;
pub(crate) mod retry;
#[cfg(test)]
#[cfg(feature = "cloud")]
mod tests;
