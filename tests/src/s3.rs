//! A server on loopback with the part of S3 that checkpoints, readers and predictions need, and
//! with configurable errors and delays.
//!
//! One thread per connection. Objects are in memory; credentials are not checked.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rand::rngs::ChaCha8Rng;
use rand::{RngExt as _, SeedableRng as _};

/// A running server.
#[derive(Clone, Debug)]
pub struct S3 {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
}

/// Rates of the faults, which are drawn for each request.
#[derive(Clone, Copy, Debug, Default)]
pub struct FaultRates {
    /// Percentage of requests that are answered with a retryable error.
    pub errors: u32,
    /// Percentage of connections that end without an answer; half of the writes among them are done
    /// first.
    pub cuts: u32,
    /// Maximum delay of an answer.
    pub delay_ms: u64,
    /// Additional delay of every answer: the network distance to the store.
    pub distance_ms: u64,
    /// Whether the store is unavailable: no connection gets an answer.
    pub unavailable: bool,
    /// Whether the credentials have expired.
    pub expired: bool,
    /// Whether requests are received and not answered.
    pub silent: bool,
}

/// Number of requests, by method.
type Requests = BTreeMap<String, u64>;

#[derive(Debug)]
struct Object {
    bytes: Arc<Vec<u8>>,
    /// A new value for each write.
    etag: u64,
}

#[derive(Debug)]
struct State {
    /// Objects, by bucket and key.
    objects: BTreeMap<String, Object>,
    /// Number of objects written so far, for their ETags.
    written: u64,
    requests: Requests,
    /// Parts, by upload.
    uploads: BTreeMap<u64, BTreeMap<u32, Vec<u8>>>,
    uploads_begun: u64,
    fault_rates: FaultRates,
    rng: ChaCha8Rng,
    /// Number of requests that a fault has hit.
    requests_hit: u64,
}

/// Starts a server on loopback. A thread serves each connection.
pub(crate) fn start<S: Clone + Send + 'static>(
    make: impl FnOnce(SocketAddr) -> S,
    serve: impl Fn(&S, TcpStream) + Copy + Send + 'static,
) -> S {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("loopback has a free port");
    let server = make(listener.local_addr().expect("a listener has an address"));
    let serving = server.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let server = serving.clone();
            std::thread::spawn(move || serve(&server, stream));
        }
    });
    server
}

impl S3 {
    /// Starts a server. `seed`: of its faults.
    pub fn start(fault_rates: FaultRates, seed: u64) -> Self {
        let state = Arc::new(Mutex::new(State {
            objects: BTreeMap::new(),
            written: 0,
            requests: Requests::new(),
            uploads: BTreeMap::new(),
            uploads_begun: 0,
            fault_rates,
            rng: ChaCha8Rng::seed_from_u64(seed),
            requests_hit: 0,
        }));
        start(|address| Self { address, state }, |server, stream| drop(server.serve(stream)))
    }

    /// The environment variables that a process needs to use it, as `NAME=value`.
    pub fn environment(&self) -> Vec<String> {
        vec![
            format!("AWS_ENDPOINT=http://{}", self.address),
            "AWS_ALLOW_HTTP=true".into(),
            "AWS_ACCESS_KEY_ID=test".into(),
            "AWS_SECRET_ACCESS_KEY=test".into(),
            "AWS_REGION=us-east-1".into(),
        ]
    }

    /// Changes the rates of the faults.
    pub fn set_fault_rates(&self, fault_rates: FaultRates) {
        self.state().fault_rates = fault_rates;
    }

    /// Number of requests that a fault has hit.
    pub fn requests_hit(&self) -> u64 {
        self.state().requests_hit
    }

    /// The requests so far.
    pub fn requests(&self) -> BTreeMap<String, u64> {
        self.state().requests.clone()
    }

    /// Names of all objects, with their buckets.
    pub fn names(&self) -> Vec<String> {
        self.state().objects.keys().cloned().collect()
    }

    /// Stores an object.
    pub fn put(&self, name: &str, bytes: Vec<u8>) {
        self.state().put(name, bytes);
    }

    /// The bytes of an object.
    pub fn bytes(&self, name: &str) -> Vec<u8> {
        self.state().objects[name].bytes.to_vec()
    }

    /// Flips one bit of an object.
    pub fn flip(&self, name: &str, bit: usize) {
        let mut state = self.state();
        let object = state.objects.get_mut(name).expect("the object is there");
        let object = Arc::make_mut(&mut object.bytes);
        let at = bit / 8 % object.len();
        object[at] ^= 1 << (bit % 8);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self, stream: TcpStream) -> std::io::Result<()> {
        stream.set_nodelay(true)?;
        let mut reader = BufReader::new(stream.try_clone()?);
        while let Some(request) = Request::read(&mut reader)? {
            let fate = self.state().draw(&request.method);
            std::thread::sleep(fate.delay);
            let reply = match fate.kind {
                Kind::Cut => return Ok(()),
                Kind::CutAfter => {
                    self.state().answer(&request);
                    return Ok(());
                }
                Kind::Error => Reply::new(503, "<Error><Code>SlowDown</Code></Error>"),
                Kind::Expired => Reply::new(400, "<Error><Code>ExpiredToken</Code></Error>"),
                Kind::None => self.state().answer(&request),
            };
            reply.write(&stream, request.method == "HEAD")?;
        }
        Ok(())
    }
}

struct RequestFault {
    kind: Kind,
    delay: Duration,
}

enum Kind {
    Cut,
    CutAfter,
    Error,
    Expired,
    None,
}

pub(crate) struct Request {
    pub(crate) method: String,
    /// The path: bucket and key, or the bucket alone.
    pub(crate) name: String,
    pub(crate) query: BTreeMap<String, String>,
    range: Option<(usize, usize)>,
    pub(crate) body: Vec<u8>,
}

impl Request {
    /// Reads the next request; `None` at the connection's end.
    pub(crate) fn read(reader: &mut BufReader<TcpStream>) -> std::io::Result<Option<Self>> {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            return Ok(None);
        }
        let mut words = line.split_whitespace();
        let (method, target) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let pair = |pair: &str| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            (name.to_owned(), decode(&value.replace('+', " ")))
        };
        let mut request = Self {
            method: method.into(),
            name: decode(path.trim_matches('/')),
            query: query.split('&').filter(|p| !p.is_empty()).map(pair).collect(),
            range: None,
            body: Vec::new(),
        };
        let mut length = 0;
        loop {
            let mut line = String::new();
            reader.read_line(&mut line)?;
            let Some((name, value)) = line.trim().split_once(':') else { break };
            match name.to_ascii_lowercase().as_str() {
                "content-length" => length = value.trim().parse().unwrap_or(0),
                "range" => {
                    let bounds =
                        value.trim().strip_prefix("bytes=").and_then(|b| b.split_once('-'));
                    request.range =
                        bounds.and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
                }
                _ => {}
            }
        }
        request.body.resize(length, 0);
        reader.read_exact(&mut request.body)?;
        Ok(Some(request))
    }
}

pub(crate) struct Reply {
    status: u16,
    headers: String,
    body: Vec<u8>,
}

impl Reply {
    pub(crate) fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self { status, headers: String::new(), body: body.into() }
    }

    pub(crate) fn write(&self, mut stream: &TcpStream, head_only: bool) -> std::io::Result<()> {
        let (status, length) = (self.status, self.body.len());
        let mut bytes = format!(
            "HTTP/1.1 {status} x\r\ncontent-length: {length}\r\n\
             last-modified: Tue, 01 Jan 2030 00:00:00 GMT\r\n{}\r\n",
            self.headers
        )
        .into_bytes();
        if !head_only {
            bytes.extend(&self.body);
        }
        stream.write_all(&bytes)
    }
}

impl State {
    fn put(&mut self, name: &str, bytes: Vec<u8>) {
        self.written += 1;
        let object = Object { bytes: Arc::new(bytes), etag: self.written };
        self.objects.insert(name.into(), object);
    }

    fn draw(&mut self, method: &str) -> RequestFault {
        let FaultRates { errors, cuts, delay_ms, distance_ms, unavailable, expired, silent } =
            self.fault_rates;
        if unavailable || silent {
            self.requests_hit += 1;
            let delay = if silent { Duration::MAX } else { Duration::ZERO };
            return RequestFault { kind: Kind::Cut, delay };
        }
        *self.requests.entry(method.into()).or_default() += 1;
        let delay = Duration::from_millis(distance_ms + self.rng.random_range(0..=delay_ms));
        let kind = match self.rng.random_range(0..100) {
            _ if expired => Kind::Expired,
            n if n < errors => Kind::Error,
            n if n < errors + cuts && n % 2 == 0 => Kind::Cut,
            n if n < errors + cuts => Kind::CutAfter,
            _ => Kind::None,
        };
        self.requests_hit += u64::from(!matches!(kind, Kind::None));
        RequestFault { kind, delay }
    }

    fn answer(&mut self, request: &Request) -> Reply {
        let Request { method, name, query, range, body } = request;
        let upload = query.get("uploadId").and_then(|id| id.parse::<u64>().ok());
        match (method.as_str(), upload) {
            ("POST", _) if query.contains_key("delete") => self.delete_all(name, body),
            ("POST", _) if query.contains_key("uploads") => {
                self.uploads_begun += 1;
                let id = self.uploads_begun;
                self.uploads.insert(id, BTreeMap::new());
                let result = "InitiateMultipartUploadResult";
                Reply::new(200, format!("<{result}><UploadId>{id}</UploadId></{result}>"))
            }
            ("POST", Some(id)) => match self.uploads.get(&id) {
                // A request that is repeated after a lost answer finds the upload completed.
                Some(parts) => {
                    let whole = parts.values().flatten().copied().collect();
                    self.put(name, whole);
                    let result = "CompleteMultipartUploadResult";
                    Reply::new(200, format!("<{result}><ETag>\"x\"</ETag></{result}>"))
                }
                None => Reply::new(404, "<Error><Code>NoSuchUpload</Code></Error>"),
            },
            ("PUT", Some(id)) => {
                let number = query.get("partNumber").and_then(|n| n.parse().ok()).unwrap_or(0);
                self.uploads.entry(id).or_default().insert(number, body.clone());
                Reply { headers: PUT_ETAG.into(), ..Reply::new(200, "") }
            }
            ("PUT", None) => {
                self.put(name, body.clone());
                Reply { headers: PUT_ETAG.into(), ..Reply::new(200, "") }
            }
            ("DELETE", _) => {
                self.objects.remove(name);
                Reply::new(204, "")
            }
            ("GET" | "HEAD", _) if query.contains_key("list-type") => self.list(name, query),
            ("GET" | "HEAD", _) => match self.objects.get(name) {
                None => Reply::new(404, "<Error><Code>NoSuchKey</Code></Error>"),
                Some(Object { bytes, etag }) => {
                    let etag = format!("etag: \"{etag}\"\r\n");
                    let Some((start, last)) = *range else {
                        return Reply { headers: etag, ..Reply::new(200, bytes.to_vec()) };
                    };
                    if start >= bytes.len() {
                        return Reply::new(416, "<Error><Code>InvalidRange</Code></Error>");
                    }
                    let end = bytes.len().min(last + 1);
                    let headers = format!(
                        "{etag}content-range: bytes {start}-{}/{}\r\n",
                        end - 1,
                        bytes.len()
                    );
                    Reply { headers, ..Reply::new(206, &bytes[start..end]) }
                }
            },
            _ => Reply::new(405, "<Error><Code>MethodNotAllowed</Code></Error>"),
        }
    }

    fn list(&self, bucket: &str, query: &BTreeMap<String, String>) -> Reply {
        let prefix = format!("{bucket}/{}", query.get("prefix").map_or("", String::as_str));
        let found =
            self.objects.range(prefix.clone()..).take_while(|(name, _)| name.starts_with(&prefix));
        let entries: String = found
            .map(|(name, object)| {
                let key = &name[bucket.len() + 1..];
                format!(
                    "<Contents><Key>{key}</Key><Size>{}</Size><LastModified>2030-01-01T00:00:00.000Z</LastModified>\
                     <ETag>\"{}\"</ETag></Contents>",
                    object.bytes.len(),
                    object.etag
                )
            })
            .collect();
        Reply::new(
            200,
            format!(
                "<ListBucketResult>{entries}<IsTruncated>false</IsTruncated></ListBucketResult>"
            ),
        )
    }

    fn delete_all(&mut self, bucket: &str, body: &[u8]) -> Reply {
        let text = String::from_utf8_lossy(body);
        let keys = text.split("<Key>").skip(1).filter_map(|rest| rest.split_once("</Key>"));
        let mut deleted = String::new();
        for (key, _) in keys {
            self.objects.remove(&format!("{bucket}/{key}"));
            deleted += &format!("<Deleted><Key>{key}</Key></Deleted>");
        }
        Reply::new(200, format!("<DeleteResult>{deleted}</DeleteResult>"))
    }
}

/// The ETags that objects get change with each write; clients do not compare them.
const PUT_ETAG: &str = "etag: \"x\"\r\n";

/// Decodes percent-encoding.
fn decode(text: &str) -> String {
    let (mut bytes, mut rest) = (Vec::new(), text.as_bytes());
    while let Some((&first, after)) = rest.split_first() {
        let code = after
            .get(..2)
            .and_then(|digits| u8::from_str_radix(str::from_utf8(digits).ok()?, 16).ok());
        match code.filter(|_| first == b'%') {
            Some(code) => {
                bytes.push(code);
                rest = &after[2..];
            }
            None => {
                bytes.push(first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
