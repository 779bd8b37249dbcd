use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::*;
use crate::dashboard::request::ScaleLimits;
use crate::job::testing::spec;
use crate::job::{Job, Time};
use crate::token::Token;

/// A server of the page of a job, and what it was commanded.
struct Server {
    address: std::net::SocketAddr,
    key: DashboardKey,
    board: Arc<Board>,
    requests: mpsc::Receiver<PageRequest>,
}

impl Server {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let key = DashboardKey::of(&Token::random().unwrap());
        let board = Arc::new(Board::new(Some(ScaleLimits::from(&spec()))));
        let (sender, requests) = mpsc::channel(4);
        let site = Site { board: Arc::clone(&board), key: key.clone(), requests: sender };
        tokio::spawn(serve(listener, Arc::new(site)));
        Self { address, key, board, requests }
    }

    fn show_job(&self) {
        let mut snapshot = Job::new(spec()).snapshot(Time(Duration::from_secs(3)));
        snapshot.status.job = "click-through-7f3a".into();
        snapshot.status.step = 7;
        self.board.observe(snapshot);
    }

    fn bearer(&self) -> String {
        let link = self.key.link(self.address);
        format!("authorization: Bearer {}\r\n", link.split('#').nth(1).unwrap())
    }

    /// Sends a request with these headers (each with its line end) and body; returns the answer.
    async fn ask(&self, request: &str, headers: &str, body: &str) -> String {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let len = body.len();
        let head = format!("{request} HTTP/1.1\r\n{headers}content-length: {len}\r\n\r\n{body}");
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        String::from_utf8(answer).unwrap()
    }
}

fn code(answer: &str) -> u16 {
    answer
        .split(' ')
        .nth(1)
        .and_then(|code| code.parse().ok())
        .unwrap_or_else(|| panic!("{answer}"))
}

#[tokio::test]
async fn the_job_is_shown_to_those_with_the_key_only() {
    let server = Server::start().await;
    let (host, key) = (format!("host: {}\r\n", server.address), server.bearer());
    let other = format!("authorization: Bearer {}\r\n", "0".repeat(32));
    assert_eq!(code(&server.ask("GET /api/job", &format!("{host}{key}"), "").await), 503);
    server.show_job();
    let table = [
        (host.clone(), 401),
        (format!("{host}{other}"), 403),
        (format!("{host}authorization: Basic eDp5\r\n"), 403),
        (format!("{host}cookie: key={}\r\n", &key[22..]), 401),
        (format!("{host}{key}"), 200),
        (format!("host: localhost:1234\r\n{key}"), 200),
        (format!("host: [::1]:1234\r\n{key}"), 200),
    ];
    for (headers, expected) in table {
        let answer = server.ask("GET /api/job", &headers, "").await;
        assert_eq!(code(&answer), expected, "{headers}: {answer:.300}");
        assert_eq!(answer.contains("\"step\":7"), expected == 200, "{answer:.300}");
    }
}

#[tokio::test]
async fn requests_of_other_hosts_and_pages_are_refused() {
    let mut server = Server::start().await;
    server.show_job();
    let key = server.bearer();
    let own = format!("host: {}\r\n", server.address);
    let table = [
        String::new(),
        "host: rebound.example\r\n".into(),
        format!("host: rebound.example:{}\r\n", server.address.port()),
        "host: 192.0.2.7\r\n".into(),
        "host: localhost.example\r\n".into(),
        format!("{own}host: rebound.example\r\n"),
        format!("{own}origin: http://other.example\r\n"),
        format!("{own}origin: https://{}\r\n", server.address),
        format!("{own}origin: null\r\n"),
    ];
    let json = "content-type: application/json\r\n";
    for headers in table {
        for (request, body) in [("GET /", ""), ("GET /api/job", ""), ("POST /api/stop", "{}")] {
            let answer = server.ask(request, &format!("{headers}{json}{key}"), body).await;
            assert!([400, 403].contains(&code(&answer)), "{request} {headers}: {answer:.200}");
        }
    }
    assert!(server.requests.try_recv().is_err(), "a refused request has reached the job");
}

#[tokio::test]
async fn a_command_with_the_key_reaches_the_job_and_its_reply_the_page() {
    let mut server = Server::start().await;
    let (own, key) = (format!("host: {}\r\n", server.address), server.bearer());
    let origin = format!("origin: http://{}\r\n", server.address);
    let json = "content-type: application/json\r\n";
    let headers = format!("{own}{origin}{json}{key}");
    let table = [
        ("POST /api/scale", r#"{"num_workers":3}"#, PageCommand::Scale(3), Ok(""), 200),
        ("POST /api/scale", r#"{"num_workers":99}"#, PageCommand::Scale(99), Err("at most 8"), 400),
        ("POST /api/stop", "{}", PageCommand::Stop, Ok(""), 200),
        ("POST /api/inspect", "{}", PageCommand::Inspect, Ok("worker 1"), 200),
    ];
    for (request, body, command, reply, expected) in table {
        let reply = reply.map(str::to_owned).map_err(str::to_owned);
        // Requests borrow the server, whose receiver is served meanwhile.
        let mut requests = std::mem::replace(&mut server.requests, mpsc::channel(1).1);
        let asking = server.ask(request, &headers, body);
        let serving = async {
            let received = requests.recv().await.unwrap();
            assert_eq!(received.command, command);
            received.reply.send(reply.clone()).unwrap();
        };
        let (answer, ()) = tokio::join!(asking, serving);
        assert_eq!(code(&answer), expected, "{answer}");
        let text = reply.unwrap_or_else(|error| error);
        assert!(answer.contains(&text), "{answer}");
        server.requests = requests;
    }
    let no_key = format!("{own}{json}");
    let long = format!("{{\"num_workers\":{}}}", "1".repeat(2000));
    let form = "content-type: application/x-www-form-urlencoded\r\n";
    let table = [
        ("POST /api/scale", no_key.as_str(), r#"{"num_workers":3}"#, 401),
        ("POST /api/stop", &no_key, "{}", 401),
        ("POST /api/inspect", &no_key, "{}", 401),
        ("GET /api/inspect", &headers, "", 405),
        ("POST /api/scale", &headers, r#"{"num_workers":-3}"#, 400),
        ("POST /api/scale", &headers, r#"{"num_workers":3,"x":1}"#, 400),
        ("POST /api/scale", &headers, &long, 413),
        ("POST /api/stop", &format!("{own}{form}{key}"), "a=b", 415),
        ("POST /api/stop", &format!("{own}{key}"), "{}", 415),
        ("GET /api/stop", &headers, "", 405),
        ("OPTIONS /api/stop", &headers, "", 405),
        ("POST /api/job", &headers, "{}", 405),
        ("GET /api/other", &headers, "", 404),
    ];
    for (request, headers, body, expected) in table {
        let answer = server.ask(request, headers, body).await;
        assert_eq!(code(&answer), expected, "{request}: {answer:.300}");
    }
    assert!(server.requests.try_recv().is_err(), "a refused request has reached the job");
}

#[tokio::test]
async fn the_page_needs_no_key_and_contains_nothing_of_the_job() {
    let server = Server::start().await;
    server.show_job();
    let own = format!("host: {}\r\n", server.address);
    let page = server.ask("GET /", &own, "").await;
    let policy = "content-security-policy: default-src 'none'; script-src 'self';";
    assert!(page.contains(policy) && !page.contains("'unsafe"), "{page:.600}");
    assert!(!page.contains("click-through"), "{page}");
    let links = page.split("src=\"").chain(page.split("rel=\"stylesheet\" href=\"")).skip(1);
    let links: Vec<&str> = links.filter_map(|rest| rest.split('"').next()).collect();
    let links: Vec<&str> = links.into_iter().filter(|link| link.starts_with('/')).collect();
    assert!(links.len() >= 7, "{links:?}");
    for link in links {
        let answer = server.ask(&format!("GET {link}"), &own, "").await;
        assert_eq!(code(&answer), 200, "{link}");
    }
    for path in ["/other", "/../Cargo.toml", "/page.js/"] {
        assert_eq!(code(&server.ask(&format!("GET {path}"), &own, "").await), 404, "{path}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_page_that_waits_learns_of_the_end_at_once() {
    let server = Server::start().await;
    server.show_job();
    let headers = format!("host: {}\r\n{}", server.address, server.bearer());
    let live = server.ask("GET /api/job", &headers, "").await;
    assert!(live.contains("\"live\":true") && live.contains("\"scale\":{"), "{live:.300}");
    server.board.end();
    let started = tokio::time::Instant::now();
    let ended = server.ask("GET /api/job?wait", &headers, "").await;
    assert!(ended.contains("\"live\":false") && ended.contains("\"scale\":null"), "{ended:.300}");
    assert!(started.elapsed() < WAIT);
}
