//! File access through one interface: a local folder or an object store, selected by the address.
//!
//! | address | storage | settings, from the environment |
//! |---|---|---|
//! | a path, `file:///path` | a local folder or file | |
//! | `s3://bucket/path` | S3, or a compatible store | `AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT`, … |
//! | `gs://bucket/path` | Google Cloud Storage | `GOOGLE_SERVICE_ACCOUNT`, … |
//! | `az://container/path` | Azure Blob Storage | `AZURE_STORAGE_ACCOUNT_NAME`, … |
//!
//! Calls block, so they must be made from threads that may block. Requests run on a small runtime
//! of their own. Requests that fail with a transient error are retried (see `retry.rs`).

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use futures::TryStreamExt;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    BackoffConfig, GetOptions, ObjectMeta, ObjectStore, ObjectStoreExt as _, ObjectStoreScheme,
    PutPayload, RetryConfig, WriteMultipart,
};
use tokio::runtime::Runtime;
use url::Url;

pub(crate) use self::retry::{Transient, WaitStatus, set_wait_flag, wait_status, with_retries};

/// A folder of files. Paths given to its methods are relative to it and use `/` as the separator;
/// the empty path is the folder, or the file, itself.
#[derive(Clone, Debug)]
pub struct Storage {
    store: Arc<dyn ObjectStore>,
    root: Path,
    address: String,
    /// Whether it is a local folder.
    is_local: bool,
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
        if address.is_empty() {
            return Err(wrong(
                "an empty address; it must be a path or s3://, gs:// or az://".into(),
            ));
        }
        if !address.contains("://") {
            let path = crate::paths::absolute(address).map_err(|error| wrong(error.to_string()))?;
            let root = Path::from_absolute_path(path).map_err(|error| wrong(error.to_string()))?;
            return Ok(Self {
                store: local::store(),
                root,
                address: address.to_owned(),
                is_local: true,
            });
        }
        let url = Url::parse(address).map_err(|error| wrong(error.to_string()))?;
        let unknown =
            || wrong("not a storage address; it must be a path or s3://, gs:// or az://".into());
        let (scheme, path) = ObjectStoreScheme::parse(&url).map_err(|_| unknown())?;
        let failed = |error: object_store::Error| wrong(error.to_string());
        // The clients use the TLS provider of the process. If another provider is already
        // installed, it is used.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let store: Arc<dyn ObjectStore> = match scheme {
            ObjectStoreScheme::Local => local::store(),
            ObjectStoreScheme::AmazonS3 => {
                let builder =
                    aws::builder().map_err(wrong)?.with_url(address).with_retry(retries());
                Arc::new(builder.build().map_err(failed)?)
            }
            ObjectStoreScheme::GoogleCloudStorage => {
                let builder =
                    GoogleCloudStorageBuilder::from_env().with_url(address).with_retry(retries());
                Arc::new(builder.build().map_err(failed)?)
            }
            ObjectStoreScheme::MicrosoftAzure => {
                let builder =
                    MicrosoftAzureBuilder::from_env().with_url(address).with_retry(retries());
                Arc::new(builder.build().map_err(failed)?)
            }
            _ => return Err(unknown()),
        };
        let root = Path::parse(path.as_ref()).map_err(|error| wrong(error.to_string()))?;
        let is_local = scheme == ObjectStoreScheme::Local;
        Ok(Self { store, root, address: address.trim_end_matches('/').to_owned(), is_local })
    }

    /// Files in `store` below `root`. `address`: name of this storage in errors.
    #[cfg(test)]
    pub(crate) fn within(
        store: Arc<dyn ObjectStore>,
        root: Path,
        address: impl Into<String>,
    ) -> Self {
        Self { store, root, address: address.into(), is_local: false }
    }

    /// Whether `address` is in an object store, not a path on this machine.
    #[must_use]
    pub(crate) fn is_remote(address: &str) -> bool {
        address.contains("://") && !address.starts_with("file:")
    }

    /// Address, as it was given.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The folder or file at `path` below this one.
    #[must_use]
    pub fn join(&self, path: &str) -> Self {
        let (store, is_local) = (Arc::clone(&self.store), self.is_local);
        Self { store, root: self.at(path), address: self.name(path), is_local }
    }

    /// Reads a whole file.
    ///
    /// # Errors
    /// [`StorageError::NotFound`], or an error of the store.
    pub fn read(&self, path: &str) -> Result<Bytes, StorageError> {
        let at = self.at(path);
        self.request(path, || async { self.store.get(&at).await?.bytes().await })
    }

    /// Reads bytes `range` of a file; fewer if the file ends before.
    ///
    /// # Errors
    /// See [`read`](Self::read). A range that begins at or after the file's end is an error.
    pub fn read_range(&self, path: &str, range: Range<u64>) -> Result<Bytes, StorageError> {
        let at = self.at(path);
        self.request(path, || self.store.get_range(&at, range.clone()))
    }

    /// Like [`read_range`](Self::read_range), but makes one attempt, on the caller's runtime, and
    /// also returns the version of the file. Retries are up to the caller.
    pub(crate) async fn fetch(
        &self,
        path: &str,
        range: Range<u64>,
    ) -> Result<(Bytes, Version), StorageError> {
        let options = GetOptions { range: Some(range.into()), ..GetOptions::default() };
        let at = self.at(path);
        let fetched = async {
            let found = self.store.get_opts(&at, options).await?;
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
        let at = self.at(path);
        self.request(path, || async { Ok(Version::of(&self.store.head(&at).await?)) })
    }

    /// Lists all files below `path`, at any depth, in the order of their paths. Empty if there is
    /// no such folder.
    ///
    /// # Errors
    /// An error of the store.
    pub fn list(&self, path: &str) -> Result<Vec<Found>, StorageError> {
        let found = self.list_versions(path)?.into_iter();
        Ok(found.map(|(path, version)| Found { path, bytes: version.bytes }).collect())
    }

    /// Like [`list`](Self::list), with the version of each file.
    pub(crate) fn list_versions(&self, path: &str) -> Result<Vec<(String, Version)>, StorageError> {
        let below = self.at(path);
        self.found(path, || self.store.list(Some(&below)).try_collect::<Vec<_>>())
    }

    /// Lists the files in those folders of this one whose names begin with `prefix`. Other entries
    /// are not read, however many there are.
    ///
    /// # Errors
    /// An error of the store.
    pub(crate) fn list_folders(&self, prefix: &str) -> Result<Vec<Found>, StorageError> {
        if self.is_local {
            return self.list_local_folders(prefix);
        }
        let (first, begins) = (self.at(prefix), self.at(prefix).to_string());
        // Stores list in lexicographical order.
        let listed = || {
            let all = self.store.list_with_offset(Some(&self.root), &first);
            let is_one = |meta: &ObjectMeta| {
                std::future::ready(Ok(meta.location.as_ref().starts_with(&begins)))
            };
            all.try_take_while(is_one).try_collect::<Vec<_>>()
        };
        let found = self.found("", listed)?.into_iter();
        Ok(found.map(|(path, version)| Found { path, bytes: version.bytes }).collect())
    }

    fn list_local_folders(&self, prefix: &str) -> Result<Vec<Found>, StorageError> {
        let top = self.request("", || self.store.list_with_delimiter(Some(&self.root)));
        let top = match top {
            Err(StorageError::NotFound { .. }) => return Ok(Vec::new()),
            other => other?,
        };
        let names = top.common_prefixes.iter().filter_map(|folder| folder.filename());
        let mut found = Vec::new();
        for name in names.filter(|name| name.starts_with(prefix)) {
            let inside = self.list(name)?.into_iter();
            found
                .extend(inside.map(|file| Found { path: format!("{name}/{}", file.path), ..file }));
        }
        found.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(found)
    }

    /// Result of `list`, as paths relative to `path`.
    fn found<F: Future<Output = object_store::Result<Vec<ObjectMeta>>>>(
        &self,
        path: &str,
        list: impl FnMut() -> F,
    ) -> Result<Vec<(String, Version)>, StorageError> {
        let below = self.at(path);
        let mut found = match self.request(path, list) {
            Ok(list) => Vec::from_iter(list.into_iter().filter_map(|meta| {
                let parts = meta.location.prefix_match(&below)?;
                let parts: Vec<_> = parts.map(|part| part.as_ref().to_owned()).collect();
                Some((parts.join("/"), Version::of(&meta)))
            })),
            Err(StorageError::NotFound { .. }) => Vec::new(),
            Err(error) => return Err(error),
        };
        found.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(found)
    }

    /// Writes a file atomically: all of `parts`, concatenated. On failure the previous content
    /// stays.
    ///
    /// Parts are not copied where the store accepts several buffers.
    ///
    /// # Errors
    /// An error of the store.
    pub fn write(&self, path: &str, parts: Vec<Bytes>) -> Result<(), StorageError> {
        let at = self.at(path);
        if self.is_local {
            let name = self.name(path);
            return with_retries(&name, || {
                local::write(&at, &parts).map_err(|error| self.error(path, error))
            });
        }
        self.request(path, || self.put(&at, parts.clone()))
    }

    async fn put(&self, at: &Path, parts: Vec<Bytes>) -> object_store::Result<()> {
        let bytes: usize = parts.iter().map(Bytes::len).sum();
        if bytes <= PART_BYTES_MIN {
            return self.store.put(at, PutPayload::from_iter(parts)).await.map(|_| ());
        }
        let piece = part_bytes(bytes);
        let upload = self.store.put_multipart(at).await?;
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

    /// Removes a file. A missing file is not an error.
    ///
    /// # Errors
    /// An error of the store.
    pub fn remove(&self, path: &str) -> Result<(), StorageError> {
        let at = self.at(path);
        match self.request(path, || self.store.delete(&at)) {
            Err(StorageError::NotFound { .. }) => Ok(()),
            other => other,
        }
    }

    /// Removes all files below `path`, `first` before the rest.
    ///
    /// # Errors
    /// An error of the store; some files may have been removed.
    pub(crate) fn remove_folder(&self, path: &str, first: &str) -> Result<(), StorageError> {
        self.remove(&format!("{path}/{first}"))?;
        for file in self.list(path)? {
            self.remove(&format!("{path}/{}", file.path))?;
        }
        if self.is_local {
            // The folder itself, and temporary files of unfinished writes, which no listing shows.
            if let Ok(folder) = LocalFileSystem::new().path_to_filesystem(&self.at(path)) {
                drop(std::fs::remove_dir_all(folder));
            }
        }
        Ok(())
    }

    fn at(&self, path: &str) -> Path {
        let parts = path.split('/').filter(|part| !part.is_empty());
        parts.fold(self.root.clone(), |at, part| at.join(part))
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

    fn error(&self, path: &str, error: object_store::Error) -> StorageError {
        match error {
            object_store::Error::NotFound { .. } => {
                StorageError::NotFound { path: self.name(path) }
            }
            source if lies_below_a_file(&source) => {
                StorageError::NotFound { path: self.name(path) }
            }
            source => StorageError::Store { path: self.name(path), source: Box::new(source) },
        }
    }
}

/// Whether a component of the path is a file, not a folder, so that nothing exists below it.
fn lies_below_a_file(error: &object_store::Error) -> bool {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<std::io::Error>() {
            return error.kind() == std::io::ErrorKind::NotADirectory;
        }
        cause = error.source();
    }
    false
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

/// The client's own retries, for short failures; they are not logged.
fn retries() -> RetryConfig {
    let backoff = BackoffConfig {
        init_backoff: Duration::from_millis(50),
        max_backoff: RETRY_TIME,
        base: 2.0,
    };
    RetryConfig { backoff, max_retries: RETRIES, retry_timeout: RETRY_TIME }
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

const RETRIES: usize = 3;

const RETRY_TIME: Duration = Duration::from_secs(1);

mod aws;
mod errors;
mod local;
mod retry;

#[cfg(test)]
mod tests {
    use super::*;

    fn folder() -> (tempfile::TempDir, Storage) {
        let folder = tempfile::tempdir().unwrap();
        let storage = Storage::open(folder.path().join("a b/c%d").to_str().unwrap()).unwrap();
        (folder, storage)
    }

    #[test]
    fn written_files_can_be_read_listed_and_removed() {
        let (folder, storage) = folder();
        assert_eq!(storage.list("").unwrap(), []);
        storage.write("x/1", vec![Bytes::from_static(b"abc"), Bytes::from_static(b"de")]).unwrap();
        storage.join("x").write("0", vec![Bytes::from_static(b"f")]).unwrap();
        let at = folder.path().join("a b/c%d/x/1");
        assert_eq!(std::fs::read(at).unwrap(), b"abcde", "the path is used as it is");
        assert_eq!(storage.read("x/1").unwrap(), "abcde");
        assert_eq!(
            (storage.read_range("x/1", 1..3).unwrap(), storage.bytes("x/1").unwrap()),
            ("bc".into(), 5)
        );
        let found = |path: &str, bytes| Found { path: path.into(), bytes };
        assert_eq!(storage.list("").unwrap(), [found("x/0", 1), found("x/1", 5)]);
        assert_eq!(storage.list("x").unwrap(), [found("0", 1), found("1", 5)]);
        storage.remove("x/1").unwrap();
        storage.remove("x/1").unwrap();
        let error = storage.read("x/1").unwrap_err();
        assert!(
            matches!(&error, StorageError::NotFound { path } if path.ends_with("c%d/x/1")),
            "{error}"
        );
        storage.write("file", vec![Bytes::from_static(b"1")]).unwrap();
        let error = storage.read("file/below").unwrap_err();
        assert!(matches!(&error, StorageError::NotFound { .. }), "{error}");
    }

    #[test]
    fn a_large_file_is_written_completely_to_folders_and_stores() {
        let (_folder, here) = folder();
        let memory = object_store::memory::InMemory::new();
        for storage in [here, Storage::within(Arc::new(memory), Path::default(), "memory")] {
            let bytes: Vec<u8> = (0..PART_BYTES_MIN * 2 + 7).map(|i| (i % 251) as u8).collect();
            let parts =
                vec![Bytes::copy_from_slice(&bytes[..100]), Bytes::copy_from_slice(&bytes[100..])];
            storage.write("large", parts).unwrap();
            assert!(storage.read("large").unwrap() == bytes);
            assert_eq!(storage.list("").unwrap().len(), 1);
        }
    }

    #[test]
    fn the_number_of_parts_stays_below_the_stores_limit() {
        assert_eq!(part_bytes(PART_BYTES_MIN + 1), PART_BYTES_MIN);
        let large = 5 << 40;
        assert!(large / part_bytes(large) < 10_000, "S3's largest object");
    }

    #[test]
    fn only_folders_with_the_prefix_are_listed() {
        let (_folder, here) = folder();
        let memory = object_store::memory::InMemory::new();
        for storage in [here, Storage::within(Arc::new(memory), Path::from("a"), "memory")] {
            assert_eq!(storage.list_folders("step-").unwrap(), []);
            for path in ["step-1/a", "step-2/b/c", "other/a", "step", "steq/a", "a", "z"] {
                storage.write(path, vec![Bytes::from_static(b"1")]).unwrap();
            }
            let found = storage.list_folders("step-").unwrap();
            let names: Vec<_> = found.iter().map(|found| found.path.as_str()).collect();
            assert_eq!(names, ["step-1/a", "step-2/b/c"]);
        }
    }

    #[test]
    fn concurrent_writers_of_one_file_leave_one_complete_version() {
        let (_folder, storage) = folder();
        std::thread::scope(|scope| {
            for byte in 0..4 {
                let storage = &storage;
                scope.spawn(move || {
                    for _ in 0..20 {
                        storage.write("same", vec![Bytes::from(vec![byte; 1 << 16])]).unwrap();
                    }
                });
            }
        });
        let bytes = storage.read("same").unwrap();
        assert!(bytes.len() == 1 << 16 && bytes.iter().all(|byte| *byte == bytes[0]));
    }

    #[test]
    fn a_file_url_is_a_path() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_str().unwrap();
        Storage::open(path).unwrap().write("a", vec![Bytes::from_static(b"1")]).unwrap();
        assert_eq!(Storage::open(&format!("file://{path}/")).unwrap().read("a").unwrap(), "1");
    }

    #[test]
    fn an_invalid_address_is_refused_and_named() {
        for address in ["", "ftp://host/x", "memory:///", "s3://", "http://host/x"] {
            let error = Storage::open(address).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{address}: ")), "{error}");
        }
        for address in ["s3://bucket/a/b", "gs://bucket/a"] {
            assert_eq!(Storage::open(address).unwrap().address(), address);
        }
    }
}
