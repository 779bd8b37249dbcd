//! Object stores: S3, Google Cloud Storage and Azure Blob Storage.

use std::error::Error;
use std::ops::Range;
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use futures::TryStreamExt as _;
use object_store::path::Path;
use object_store::{
    GetOptions, ObjectMeta, ObjectStore, ObjectStoreExt as _, PutPayload, WriteMultipart,
};
use tokio::runtime::Runtime;
use tokio::time::{sleep, timeout};

use super::errors::Failed;
use super::listing::{Listing, Version};
use super::retry::{STOP_CHECK, WAITS, Waiter, stop_flag};

/// The objects below a key of a store, or the object with this key.
#[derive(Clone, Debug)]
pub(super) struct Objects {
    pub(super) store: Arc<dyn ObjectStore>,
    /// Address of the bucket, for users.
    pub(super) bucket: Arc<str>,
    pub(super) key: Path,
}

impl Objects {
    /// The objects at `rest`, a bucket and a key. Makes no request.
    pub(super) fn open(scheme: &str, rest: &str) -> Result<Self, String> {
        let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
        let store = client::client(scheme, bucket)?;
        let bucket = format!("{scheme}://{bucket}").into();
        Ok(Self { store, bucket, key: keys::parse_key(key)? })
    }

    pub(super) fn below(&self, path: &str) -> Self {
        self.at(keys::below(&self.key, path))
    }

    pub(super) fn beside(&self, name: &str) -> Self {
        let mut parts: Vec<_> = self.key.parts().collect();
        parts.pop();
        self.at(keys::below(&parts.into_iter().collect(), name))
    }

    fn at(&self, key: Path) -> Self {
        Self { store: Arc::clone(&self.store), bucket: Arc::clone(&self.bucket), key }
    }

    pub(super) fn read(&self) -> Result<Bytes, Failed> {
        wait(async { self.store.get(&self.key).await?.bytes().await })
    }

    pub(super) fn read_range(&self, range: &Range<u64>) -> Result<Bytes, Failed> {
        wait(self.store.get_range(&self.key, range.clone()))
    }

    /// Reads bytes `range`, and the version that they are of.
    pub(super) fn fetch(&self, range: Range<u64>) -> Result<(Bytes, Version), Failed> {
        wait(fetch(&self.store, &self.key, range))
    }

    pub(super) fn fetch_in_background(
        &self,
        range: Range<u64>,
        done: impl FnOnce(Option<(Bytes, Version)>) + Send + 'static,
    ) {
        let (store, key) = (Arc::clone(&self.store), self.key.clone());
        runtime().spawn(async move { done(fetch(&store, &key, range).await.ok()) });
    }

    pub(super) fn version(&self) -> Result<Version, Failed> {
        self.ask(async { Ok(Version::of(&self.store.head(&self.key).await?)) })
    }

    pub(super) fn list(&self) -> Result<Listing, Failed> {
        let listed = self.store.list(Some(&self.key)).try_collect::<Vec<_>>();
        self.listing(listed)
    }

    /// Lists the objects in those folders whose names begin with `prefix`.
    pub(super) fn list_folders(&self, prefix: &str) -> Result<Listing, Failed> {
        let first = keys::below(&self.key, prefix);
        // Stores list in lexicographical order.
        let all = self.store.list_with_offset(Some(&self.key), &first);
        let is_one = |meta: &ObjectMeta| {
            std::future::ready(Ok(meta.location.as_ref().starts_with(first.as_ref())))
        };
        self.listing(all.try_take_while(is_one).try_collect::<Vec<_>>())
    }

    /// Result of `list`, as paths relative to these objects.
    fn listing(
        &self,
        list: impl Future<Output = object_store::Result<Vec<ObjectMeta>>>,
    ) -> Result<Listing, Failed> {
        let (list, left_out) = self.ask(listings::noting_left_out(list))?;
        let mut files = Vec::from_iter(list.into_iter().filter_map(|meta| {
            let parts = meta.location.prefix_match(&self.key)?;
            let parts: Vec<_> = parts.map(|part| part.as_ref().to_owned()).collect();
            Some((parts.join("/"), Version::of(&meta)))
        }));
        files.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(Listing { files, left_out })
    }

    pub(super) fn write(&self, parts: &[Bytes]) -> Result<(), Failed> {
        Ok(runtime().block_on(self.put(parts))?)
    }

    pub(super) fn copy_beside(&self, suffix: &str) -> Result<(), Failed> {
        let to = format!("{}{suffix}", self.key);
        let to = Path::parse(&to).unwrap_or_else(|_| Path::from(to));
        wait(self.store.copy(&self.key, &to))
    }

    pub(super) fn remove(&self) -> Result<(), Failed> {
        self.ask(self.store.delete(&self.key))
    }

    /// The result of a request that answers at once (see [`answer`](Self::answer)).
    fn ask<T>(&self, request: impl Future<Output = object_store::Result<T>>) -> Result<T, Failed> {
        Ok(runtime().block_on(self.answer(request, SILENCE))?)
    }

    /// Writes an object. In a job that stops, each part has as much time as a request.
    async fn put(&self, parts: &[Bytes]) -> object_store::Result<()> {
        let bytes: usize = parts.iter().map(Bytes::len).sum();
        if bytes <= PART_BYTES_MIN {
            let whole = PutPayload::from_iter(parts.iter().cloned());
            return self.answer(self.store.put(&self.key, whole), SILENCE).await.map(|_| ());
        }
        let piece = part_bytes(bytes);
        let upload = self.answer(self.store.put_multipart(&self.key), SILENCE).await?;
        let mut upload = WriteMultipart::new_with_chunk_size(upload, piece);
        if let Err(error) = self.send_parts(&mut upload, parts, piece).await {
            // An upload that is not aborted is billed, and no listing shows it.
            drop(timeout(ABORT_LIMIT, upload.abort()).await);
            return Err(error);
        }
        self.answer(upload.finish(), SILENCE).await.map(|_| ())
    }

    /// Sends all but what is left for the last part.
    async fn send_parts(
        &self,
        upload: &mut WriteMultipart,
        parts: &[Bytes],
        piece: usize,
    ) -> object_store::Result<()> {
        for mut part in parts.iter().cloned() {
            while !part.is_empty() {
                self.answer(upload.wait_for_capacity(PARTS_AT_ONCE), SILENCE).await?;
                upload.put(part.split_to(part.len().min(piece)));
            }
        }
        for left in (1..=PARTS_AT_ONCE).rev() {
            self.answer(upload.wait_for_capacity(left), SILENCE).await?;
        }
        Ok(())
    }

    /// The result of `request`, which writes or is short (see [`unless_stopped`]). After `silence`
    /// users are told that a trainer waits: it has a flag of its job, and no other program notices.
    async fn answer<T>(
        &self,
        request: impl Future<Output = object_store::Result<T>>,
        silence: Duration,
    ) -> object_store::Result<T> {
        let mut request = pin!(unless_stopped(request, STOP_LIMIT));
        if stop_flag().is_none() {
            return request.await;
        }
        if let Ok(done) = timeout(silence, &mut request).await {
            return done;
        }
        let address = format!("{}/{}", self.bucket, self.key);
        let text = format!("no answer for {} s", silence.as_secs());
        let waiter = Waiter::begin(&WAITS, &address, &text, limits::IDLE_MAX);
        let done = request.await;
        waiter.end(!matches!(&done, Err(error) if errors::is_transient(error)));
        done
    }
}

/// Checks the key of an object.
pub(super) fn check_key(key: &str) -> Result<(), String> {
    keys::parse_key(key).map(drop)
}

/// Whether the access with this error may succeed later.
pub(super) fn is_transient(error: &(dyn Error + Send + Sync + 'static)) -> bool {
    error.downcast_ref().is_some_and(errors::is_transient)
}

/// Whether the store refuses the credentials.
pub(super) fn is_refusal(error: &(dyn Error + Send + Sync + 'static)) -> bool {
    error.downcast_ref().is_some_and(errors::is_refusal)
}

/// A short text for an error.
pub(super) fn reason(error: &(dyn Error + Send + Sync + 'static)) -> String {
    error.downcast_ref().map_or_else(|| error.to_string(), errors::reason)
}

impl From<object_store::Error> for Failed {
    fn from(error: object_store::Error) -> Self {
        match error {
            object_store::Error::NotFound { source, .. }
                if !errors::is_missing_bucket(&source.to_string()) =>
            {
                Self::NotFound
            }
            other => Self::Other(Box::new(other)),
        }
    }
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

async fn fetch(
    store: &dyn ObjectStore,
    key: &Path,
    range: Range<u64>,
) -> object_store::Result<(Bytes, Version)> {
    let options = GetOptions { range: Some(range.into()), ..GetOptions::default() };
    let found = store.get_opts(key, options).await?;
    let version = Version::of(&found.meta);
    Ok((found.bytes().await?, version))
}

/// Makes a request and waits for its result.
fn wait<T>(request: impl Future<Output = object_store::Result<T>>) -> Result<T, Failed> {
    Ok(runtime().block_on(unless_stopped(request, STOP_LIMIT))?)
}

/// The result of `request`. If this thread's job stops (`set_stop_flag`), the request is given up
/// `limit` after that, or after its own start: a client waits for as long as a slow link needs.
async fn unless_stopped<T>(
    request: impl Future<Output = object_store::Result<T>>,
    limit: Duration,
) -> object_store::Result<T> {
    let Some(flag) = stop_flag() else { return request.await };
    let stopped = async {
        while !flag.load(Ordering::Acquire) {
            sleep(STOP_CHECK).await;
        }
        sleep(limit).await;
    };
    tokio::select! {
        biased;
        done = request => done,
        () = stopped => Err(errors::given_up(limit)),
    }
}

/// Size of the parts in which `bytes` are uploaded.
fn part_bytes(bytes: usize) -> usize {
    bytes.div_ceil(PARTS_MAX).max(PART_BYTES_MIN)
}

/// Runtime of all requests. Callers may be threads of any other runtime, or of none.
fn runtime() -> &'static Runtime {
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

/// How long a job that stops waits for a request: two attempts are within the minute that its
/// master waits for an export.
const STOP_LIMIT: Duration = Duration::from_secs(15);

/// Time without an answer after which users are told.
const SILENCE: Duration = Duration::from_secs(5);

const ABORT_LIMIT: Duration = Duration::from_secs(2);

mod aws;
mod client;
mod errors;
mod keys;
mod limits;
mod listings;

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use futures::future::BoxFuture;

    use super::super::retry::{set_stop_flag, set_wait_flag, wait_status};
    use super::*;

    #[test]
    fn a_stop_gives_up_requests_that_are_not_answered() {
        let asked = |request: BoxFuture<'_, object_store::Result<u8>>| {
            runtime().block_on(unless_stopped(request, Duration::ZERO))
        };
        let flag = Arc::new(AtomicBool::new(false));
        set_stop_flag(Arc::clone(&flag));
        assert_eq!(asked(Box::pin(async { Ok(7) })).unwrap(), 7);
        // The job stops while the request is on its way.
        let silent = Box::pin(async {
            flag.store(true, Ordering::Release);
            std::future::pending().await
        });
        let error = asked(silent).unwrap_err();
        assert!(errors::is_transient(&error), "reads are repeated: {error}");
        let reason = errors::reason(&error);
        assert_eq!(reason, "no answer: none within 0 s, and the job stops");
    }

    #[test]
    fn a_write_that_is_not_answered_is_reported_while_its_trainer_waits() {
        let store = Arc::new(object_store::memory::InMemory::new());
        let at = Objects { store, bucket: "s3://models".into(), key: "m.st".into() };
        let is_reported = Arc::new(AtomicBool::new(false));
        set_wait_flag(Arc::clone(&is_reported));
        let silent = async {
            for _ in 0..400 {
                if is_reported.load(Ordering::Acquire) {
                    break;
                }
                sleep(STOP_CHECK).await;
            }
            Ok(wait_status().storage)
        };
        set_stop_flag(Arc::default());
        let status = runtime().block_on(at.answer(silent, Duration::ZERO)).unwrap();
        assert!(status.is_some() && !is_reported.load(Ordering::Acquire), "{status:?}");
    }

    #[test]
    fn a_listing_that_is_not_answered_is_reported_while_its_trainer_waits() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        // It accepts connections, and never answers.
        let listener = std::net::TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 0)).unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let builder = object_store::aws::AmazonS3Builder::new().with_endpoint(endpoint);
        let builder = builder.with_bucket_name("b").with_allow_http(true);
        let store = builder.with_access_key_id("a").with_secret_access_key("b").build().unwrap();
        let (store, bucket) = (Arc::new(store), "s3://silent".into());
        std::thread::spawn(|| {
            set_stop_flag(Arc::default());
            drop(Objects { store, bucket, key: "checkpoints".into() }.list());
        });
        let is_told = || wait_status().storage.is_some_and(|text| text.contains("s3://silent"));
        let began = std::time::Instant::now();
        while !is_told() {
            assert!(began.elapsed() < SILENCE * 5, "{:?}", wait_status());
            std::thread::sleep(STOP_CHECK);
        }
    }

    #[test]
    fn the_number_of_parts_stays_below_the_stores_limit() {
        assert_eq!(part_bytes(PART_BYTES_MIN + 1), PART_BYTES_MIN);
        let large = 5 << 40;
        assert!(large / part_bytes(large) < 10_000, "S3's largest object");
    }
}
