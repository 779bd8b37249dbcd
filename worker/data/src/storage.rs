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

use std::fmt;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use futures::TryStreamExt;
use object_store::path::Path;
use object_store::{
    GetOptions, ObjectMeta, ObjectStore, ObjectStoreExt as _, PutPayload, WriteMultipart,
};
use tokio::runtime::Runtime;

pub(crate) use self::retry::{Transient, with_retries};

/// A folder of files. Paths given to its methods are relative to it and use `/` as the separator;
/// the empty path is the folder, or the file, itself.
#[derive(Clone, Debug)]
pub struct Storage {
    place: Place,
    address: String,
}

/// Where the files are.
#[derive(Clone, Debug)]
enum Place {
    /// A path of this machine.
    Local(PathBuf),
    /// The objects below a key.
    Store(Arc<dyn ObjectStore>, Path),
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
    /// The request failed or timed out; transient errors were retried before.
    #[error("{path}: {reason}", reason = errors::reason(source))]
    Store {
        /// Full address of the file.
        path: String,
        /// Error of the store.
        source: Box<object_store::Error>,
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
        Ok(Self { place, address: address.to_owned() })
    }

    /// Files in `store` below `root`. `address`: name of this storage in errors.
    #[doc(hidden)]
    pub fn within(store: Arc<dyn ObjectStore>, root: Path, address: impl Into<String>) -> Self {
        Self { place: Place::Store(store, root), address: address.into() }
    }

    /// Whether `address` is in an object store, not a path on this machine.
    #[must_use]
    #[doc(hidden)]
    pub fn is_remote(address: &str) -> bool {
        keys::scheme(address).is_some_and(|(scheme, _)| scheme != "file")
    }

    /// Checks the key of an object's address.
    pub(crate) fn check_key(address: &str) -> Result<(), StorageError> {
        let rest = keys::scheme(address).map_or(address, |(_, rest)| rest);
        let key = rest.split_once('/').map_or("", |(_, key)| key);
        let wrong = |reason| StorageError::Address { address: address.to_owned(), reason };
        keys::parse_key(key).map(drop).map_err(wrong)
    }

    /// Address, as it was given.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The folder or file at `path` below this one.
    #[must_use]
    pub fn join(&self, path: &str) -> Self {
        Self { place: self.place.at(path), address: self.name(path) }
    }

    /// Reads a whole file.
    ///
    /// # Errors
    /// [`StorageError::NotFound`], or an error of the store.
    pub fn read(&self, path: &str) -> Result<Bytes, StorageError> {
        match self.place.at(path) {
            Place::Local(at) => self.local(path, || std::fs::read(&at).map(Bytes::from)),
            Place::Store(store, at) => {
                self.request(path, || async { store.get(&at).await?.bytes().await })
            }
        }
    }

    /// Reads bytes `range` of a file; fewer if the file ends before.
    ///
    /// # Errors
    /// See [`read`](Self::read). A range that begins at or after the file's end is an error.
    pub fn read_range(&self, path: &str, range: Range<u64>) -> Result<Bytes, StorageError> {
        match self.place.at(path) {
            Place::Local(at) => self.local(path, || local::read_range(&at, &range)),
            Place::Store(store, at) => self.request(path, || store.get_range(&at, range.clone())),
        }
    }

    /// Like [`read_range`](Self::read_range), but makes one attempt, on the caller's runtime, and
    /// also returns the version of the file. Retries are up to the caller.
    pub(crate) async fn fetch(
        &self,
        path: &str,
        range: Range<u64>,
    ) -> Result<(Bytes, Version), StorageError> {
        let Place::Store(store, at) = self.place.at(path) else {
            unreachable!("the files of this machine are not fetched");
        };
        let options = GetOptions { range: Some(range.into()), ..GetOptions::default() };
        let fetched = async {
            let found = store.get_opts(&at, options).await?;
            let version = Version::of(&found.meta);
            Ok((found.bytes().await?, version))
        };
        fetched.await.map_err(|error| self.error(path, error))
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
            Place::Local(at) => self.local(path, || local::version(&at)),
            Place::Store(store, at) => {
                self.request(path, || async { Ok(Version::of(&store.head(&at).await?)) })
            }
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
            Place::Local(at) => self.local(path, || local::list(&at)),
            Place::Store(store, at) => {
                self.found(path, &at, || store.list(Some(&at)).try_collect::<Vec<_>>())
            }
        }
    }

    /// Lists the files in those folders of this one whose names begin with `prefix`. Other entries
    /// are not read, however many there are.
    ///
    /// # Errors
    /// An error of the store.
    #[doc(hidden)]
    pub fn list_folders(&self, prefix: &str) -> Result<Vec<Found>, StorageError> {
        let (store, root) = match &self.place {
            Place::Local(root) => return self.list_local_folders(root, prefix),
            Place::Store(store, root) => (store, root),
        };
        let first = keys::below(root, prefix);
        // Stores list in lexicographical order.
        let listed = || {
            let all = store.list_with_offset(Some(root), &first);
            let is_one = |meta: &ObjectMeta| {
                std::future::ready(Ok(meta.location.as_ref().starts_with(first.as_ref())))
            };
            all.try_take_while(is_one).try_collect::<Vec<_>>()
        };
        let found = self.found("", root, listed)?.files.into_iter();
        Ok(found.map(|(path, version)| Found { path, bytes: version.bytes }).collect())
    }

    fn list_local_folders(
        &self,
        root: &std::path::Path,
        prefix: &str,
    ) -> Result<Vec<Found>, StorageError> {
        let mut found = Vec::new();
        for name in self.local("", || local::folders(root, prefix))? {
            let inside = self.list(&name)?.into_iter();
            found
                .extend(inside.map(|file| Found { path: format!("{name}/{}", file.path), ..file }));
        }
        found.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(found)
    }

    /// Result of `list`, as paths relative to `below`, which is at `path`.
    fn found<F: Future<Output = object_store::Result<Vec<ObjectMeta>>>>(
        &self,
        path: &str,
        below: &Path,
        mut list: impl FnMut() -> F,
    ) -> Result<Listing, StorageError> {
        let listed = self.request(path, || listings::noting_left_out(list()));
        let (list, left_out) = match listed {
            Err(StorageError::NotFound { .. }) => return Ok(Listing::default()),
            listed => listed?,
        };
        let mut files = Vec::from_iter(list.into_iter().filter_map(|meta| {
            let parts = meta.location.prefix_match(below)?;
            let parts: Vec<_> = parts.map(|part| part.as_ref().to_owned()).collect();
            Some((parts.join("/"), Version::of(&meta)))
        }));
        files.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(Listing { files, left_out })
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
            Place::Local(at) => self.local(path, || local::write(&at, &parts)),
            Place::Store(store, at) => self.request(path, || put(&*store, &at, parts.clone())),
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
            Place::Local(at) => self.local("", || local::copy_beside(at, suffix)),
            Place::Store(store, at) => {
                let to = format!("{at}{suffix}");
                let to = Path::parse(&to).unwrap_or_else(|_| Path::from(to));
                self.request("", || store.copy(at, &to))
            }
        }
    }

    /// Removes a file. A missing file is not an error.
    ///
    /// # Errors
    /// An error of the store.
    pub fn remove(&self, path: &str) -> Result<(), StorageError> {
        let removed = match self.place.at(path) {
            Place::Local(at) => self.local(path, || std::fs::remove_file(&at)),
            Place::Store(store, at) => self.request(path, || store.delete(&at)),
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

    fn name(&self, path: &str) -> String {
        match path {
            "" => self.address.clone(),
            path => format!("{}/{path}", self.address.trim_end_matches('/')),
        }
    }

    /// Makes a request, with retries, and waits for its result.
    fn request<T, F: Future<Output = object_store::Result<T>>>(
        &self,
        path: &str,
        mut request: impl FnMut() -> F,
    ) -> Result<T, StorageError> {
        with_retries(&self.name(path), || {
            runtime().block_on(request()).map_err(|error| self.error(path, error))
        })
    }

    /// Accesses files of this machine, with retries.
    fn local<T>(
        &self,
        path: &str,
        mut access: impl FnMut() -> std::io::Result<T>,
    ) -> Result<T, StorageError> {
        use std::io::ErrorKind::{IsADirectory, NotADirectory, NotFound};
        with_retries(&self.name(path), || {
            access().map_err(|error| match error.kind() {
                // Nothing exists below a file.
                NotFound | NotADirectory | IsADirectory => {
                    StorageError::NotFound { path: self.name(path) }
                }
                _ => {
                    let source = Box::new(error);
                    let error = object_store::Error::Generic { store: "local", source };
                    self.error(path, error)
                }
            })
        })
    }

    fn error(&self, path: &str, error: object_store::Error) -> StorageError {
        match error {
            object_store::Error::NotFound { source, .. }
                if !errors::is_missing_bucket(&source.to_string()) =>
            {
                StorageError::NotFound { path: self.name(path) }
            }
            source => StorageError::Store { path: self.name(path), source: Box::new(source) },
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
            Self::Store(store, root) => Self::Store(Arc::clone(store), keys::below(root, path)),
        }
    }
}

async fn put(store: &dyn ObjectStore, at: &Path, parts: Vec<Bytes>) -> object_store::Result<()> {
    let bytes: usize = parts.iter().map(Bytes::len).sum();
    if bytes <= PART_BYTES_MIN {
        return store.put(at, PutPayload::from_iter(parts)).await.map(|_| ());
    }
    let piece = part_bytes(bytes);
    let upload = store.put_multipart(at).await?;
    let mut upload = WriteMultipart::new_with_chunk_size(upload, piece);
    for mut part in parts {
        while !part.is_empty() {
            if let Err(error) = upload.wait_for_capacity(PARTS_AT_ONCE).await {
                // An upload that is not aborted is billed, and no listing shows it.
                drop(upload.abort().await);
                return Err(error);
            }
            upload.put(part.split_to(part.len().min(piece)));
        }
    }
    upload.finish().await.map(|_| ())
}

impl Version {
    fn of(meta: &ObjectMeta) -> Self {
        // A listing may have ETags without the quotes of the header, and times in another
        // resolution.
        let tag = meta.e_tag.as_deref().map(|tag| tag.trim_matches('"').to_owned());
        let tag = tag.unwrap_or_else(|| meta.last_modified.timestamp().to_string());
        Self { bytes: meta.size, tag }
    }
}

impl StorageError {
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
        matches!(self, Self::Store { source, .. } if errors::is_transient(source))
    }
}

impl fmt::Display for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.address)
    }
}

/// Size of the parts in which `bytes` are uploaded.
fn part_bytes(bytes: usize) -> usize {
    bytes.div_ceil(PARTS_MAX).max(PART_BYTES_MIN)
}

/// Runtime of all requests. Callers may be threads of any other runtime, or of none.
pub(crate) fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("storage")
            .enable_all()
            .build()
            .expect("the system has two more threads for a training process")
    })
}

/// Files above this size are uploaded in parts of at least this size.
const PART_BYTES_MIN: usize = 16 << 20;

/// Maximum number of parts of an upload; S3's limit is 10,000.
const PARTS_MAX: usize = 9_000;

const PARTS_AT_ONCE: usize = 4;

mod address;
mod aws;
mod errors;
mod keys;
mod listings;
mod local;
pub(crate) mod retry;
#[cfg(test)]
mod tests;
