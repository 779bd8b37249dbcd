//! Time limits of requests. A limit on whole requests, which clients have, lets no large request
//! succeed on a slow link: each attempt begins anew.
//!
//! * A request with little content fails after 30 s in which nothing is received.
//! * A request with more content has more time, for 32 KiB/s.

use std::sync::OnceLock;
use std::time::Duration;

use async_trait::async_trait;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector as _, HttpError, HttpRequest, HttpResponse, HttpService,
    ReqwestConnector,
};

/// A client that chooses the limit of each request.
#[derive(Debug)]
pub(super) struct Limited {
    options: ClientOptions,
    /// Longest time in which nothing is received.
    idle: Duration,
    small: HttpClient,
    /// Clients for requests with content, by their limits.
    large: [OnceLock<HttpClient>; FACTORS.len()],
}

impl Limited {
    pub(super) fn connect(options: &ClientOptions, idle: Duration) -> object_store::Result<Self> {
        let options = options.clone().with_timeout_disabled();
        let small = options.clone().with_read_timeout(idle);
        let small = ReqwestConnector::default().connect(&small)?;
        Ok(Self { options, idle, small, large: Default::default() })
    }

    /// The client for a request with so much content. The one for small requests counts the time
    /// of sending, too.
    fn client(&self, bytes: usize) -> &HttpClient {
        if bytes <= SMALL_BYTES {
            return &self.small;
        }
        let needed = self.idle + Duration::from_secs_f64(bytes as f64 / BYTES_PER_S);
        let fits = |factor: &u32| self.idle * *factor >= needed;
        let number = FACTORS.iter().position(fits).unwrap_or(FACTORS.len() - 1);
        self.large[number].get_or_init(|| {
            let options = self.options.clone().with_timeout(self.idle * FACTORS[number]);
            ReqwestConnector::default().connect(&options).expect("the options were accepted before")
        })
    }
}

#[async_trait]
impl HttpService for Limited {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        self.client(request.body().content_length()).execute(request).await
    }
}

pub(super) const IDLE_MAX: Duration = Duration::from_secs(30);
/// Speed of a link that is slow and not broken.
const BYTES_PER_S: f64 = 32.0 * 1024.0;
/// Content that takes no time.
const SMALL_BYTES: usize = 16 << 10;
/// Limits of requests with content, in multiples of the longest silence.
const FACTORS: [u32; 6] = [2, 4, 8, 16, 32, 128];

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{Ipv4Addr, TcpListener};

    use object_store::ObjectStoreExt as _;
    use object_store::aws::AmazonS3Builder;

    use super::super::listings::Connector;
    use super::*;

    const IDLE: Duration = Duration::from_secs(2);

    /// A server that receives 16 KiB each 100 ms, and answers unless it is silent.
    fn server(is_silent: bool) -> String {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                std::thread::spawn(move || {
                    let (mut bytes, mut request) = (vec![0; 16 << 10], Vec::new());
                    let mut expected = usize::MAX;
                    while request.len() < expected {
                        let n = stream.read(&mut bytes).unwrap_or(0);
                        if n == 0 {
                            return;
                        }
                        request.extend_from_slice(&bytes[..n]);
                        let text = String::from_utf8_lossy(&request);
                        if let Some((head, _)) = text.split_once("\r\n\r\n") {
                            let lines = head.lines().map(str::to_ascii_lowercase);
                            let length = lines
                                .filter_map(|line| {
                                    line.strip_prefix("content-length: ")?.parse().ok()
                                })
                                .next();
                            expected = head.len() + 4 + length.unwrap_or(0);
                        }
                        std::thread::sleep(Duration::from_millis(100));
                    }
                    let answer = "HTTP/1.1 200 OK\r\netag: \"x\"\r\ncontent-length: 1\r\n";
                    let date = "last-modified: Tue, 01 Jan 2030 00:00:00 GMT\r\n\r\n";
                    let _ = write!(stream, "{answer}{date}");
                    if is_silent {
                        std::thread::sleep(Duration::from_secs(60));
                    }
                    let _ = write!(stream, "x");
                });
            }
        });
        format!("http://{address}")
    }

    fn store(endpoint: String) -> impl object_store::ObjectStore {
        let retry = object_store::RetryConfig { max_retries: 0, ..Default::default() };
        let builder = AmazonS3Builder::new().with_bucket_name("b").with_endpoint(endpoint);
        let keys = builder.with_access_key_id("a").with_secret_access_key("b");
        let connector = Connector { idle: IDLE };
        keys.with_allow_http(true).with_retry(retry).with_http_connector(connector).build().unwrap()
    }

    #[tokio::test]
    async fn a_slow_upload_has_the_time_that_it_needs_and_silence_has_not() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let slow = store(server(false));
        slow.put(&"large".into(), vec![0; 600 << 10].into()).await.unwrap();
        assert_eq!(slow.get(&"small".into()).await.unwrap().bytes().await.unwrap(), "x");
        let silent = store(server(true)).get(&"small".into()).await.unwrap();
        assert!(silent.bytes().await.is_err());
    }

    #[test]
    fn the_limit_grows_with_the_content() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let options = ClientOptions::new();
        let limited = Limited::connect(&options, IDLE_MAX).unwrap();
        let number = |bytes: usize| {
            let chosen = limited.client(bytes);
            limited.large.iter().position(|c| c.get().is_some_and(|c| std::ptr::eq(c, chosen)))
        };
        assert_eq!(number(SMALL_BYTES), None);
        assert_eq!(number(900 << 10), Some(0));
        assert_eq!(number(1200 << 10), Some(1));
        assert_eq!(number(16 << 20), Some(4));
        assert_eq!(number(usize::MAX), Some(5));
    }
}
