//! The server over TLS.

use std::error::Error as _;

use tonic::transport::{Certificate, ClientTlsConfig};

use super::*;
use crate::certificates::Certificates;
use crate::service::incoming::UNAUTHENTICATED_MAX;

const NAME: &str = "mnist-master";
const TIMEOUT: Duration = Duration::from_secs(60);

fn certificates() -> Certificates {
    Certificates::generate("mnist", &[NAME.into(), "mnist-master.ml.svc".into()]).unwrap()
}

/// A server with the identity of `certificates`, and a client endpoint that expects it.
async fn start(certificates: &Certificates) -> ServerFixture {
    let identity = Identity::from_pem(&certificates.certificate, &certificates.key).unwrap();
    ServerFixture::start_with(Some(identity), |address| endpoint(address, &certificates.ca, NAME))
        .await
}

fn endpoint(address: SocketAddr, ca: &str, name: &str) -> Endpoint {
    let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ca)).domain_name(name);
    Endpoint::from_shared(format!("https://{address}")).unwrap().tls_config(tls).unwrap()
}

/// The root cause for which a connection fails.
async fn refusal(endpoint: Endpoint) -> String {
    let error = endpoint.connect().await.unwrap_err();
    let mut cause = error.source().unwrap();
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    cause.to_string()
}

#[tokio::test]
async fn a_client_with_the_jobs_ca_and_its_masters_name_connects() {
    let certificates = certificates();
    let mut fixture = start(&certificates).await;
    fixture.admitted().await;
    fixture.endpoint = endpoint(fixture.address, &certificates.ca, "mnist-master.ml.svc");
    let (_stream, _, outbox) = fixture.admitted().await;
    outbox.refuse("enough".into());
}

#[tokio::test]
async fn another_ca_and_another_name_are_refused() {
    let certificates = certificates();
    let mut fixture = start(&certificates).await;
    let other = self::certificates().ca;
    let why = refusal(endpoint(fixture.address, &other, NAME)).await;
    assert!(why.contains("invalid peer certificate"), "{why}");
    let why = refusal(endpoint(fixture.address, &certificates.ca, "cifar-master")).await;
    assert!(why.contains("not valid for name"), "{why}");
    fixture.assert_nothing_reached_the_queue().await;
}

#[tokio::test]
async fn a_plaintext_request_is_not_served() {
    let mut fixture = start(&certificates()).await;
    // A channel may exist before the server has closed the connection.
    if let Ok(channel) =
        Endpoint::from_shared(format!("http://{}", fixture.address)).unwrap().connect().await
    {
        let request = with_token(StatusRequest, &fixture.token.to_bearer());
        let mut client = MasterClient::new(channel);
        let answer = tokio::time::timeout(TIMEOUT, client.status(request)).await;
        assert!(matches!(answer, Ok(Err(_))), "the server answered a plaintext request");
    }
    fixture.assert_nothing_reached_the_queue().await;
}

#[tokio::test]
async fn peers_that_never_finish_their_handshake_time_out() {
    let mut fixture = start(&certificates()).await;
    // The header of a TLS record of a ClientHello, without the record.
    let header: &[u8] = &[0x16, 0x03, 0x01, 0x02, 0x00, 0x01];
    let mut silent = Vec::new();
    for index in 0..UNAUTHENTICATED_MAX + 64 {
        let mut stream = TcpStream::connect(fixture.address).await.unwrap();
        if index % 2 == 0 {
            stream.write_all(header).await.unwrap();
        }
        silent.push(stream);
    }
    tokio::time::pause();
    for mut stream in silent {
        // A reset also ends the connection.
        let mut rest = Vec::new();
        assert!(tokio::time::timeout(MUCH_LATER, stream.read_to_end(&mut rest)).await.is_ok());
    }
    tokio::time::resume();
    let served = tokio::time::timeout(TIMEOUT, fixture.assert_nothing_reached_the_queue()).await;
    assert!(served.is_ok(), "no other connection is accepted");
}

/// Loopback addresses are those of different peers: 127.0.0.2, 127.0.0.3, …
async fn connect_from(host: u8, to: SocketAddr) -> TcpStream {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind((Ipv4Addr::new(127, 0, 0, host), 0).into()).unwrap();
    socket.connect(to).await.unwrap()
}

#[tokio::test]
async fn peers_without_the_token_lock_out_no_other_address() {
    let mut fixture = start(&certificates()).await;
    let mut silent = Vec::new();
    // No time passes that would close them. Together they have as many as they may, and more.
    for host in 2..12 {
        for _ in 0..UNAUTHENTICATED_MAX / 8 {
            silent.push(connect_from(host, fixture.address).await);
        }
    }
    let started = std::time::Instant::now();
    let served = tokio::time::timeout(TIMEOUT, fixture.assert_nothing_reached_the_queue()).await;
    assert!(served.is_ok(), "no other connection is accepted");
    assert!(started.elapsed() < crate::limits::AUTHENTICATION_TIMEOUT, "it waited for a timeout");
    drop(silent);
}

/// As behind a network that masquerades the pods of a node.
#[tokio::test]
async fn many_workers_of_one_address_complete_their_handshakes_at_once() {
    let mut fixture = start(&certificates()).await;
    let mut first = connect_from(2, fixture.address).await;
    let mut others = Vec::new();
    for _ in 0..UNAUTHENTICATED_MAX / 2 {
        others.push(connect_from(2, fixture.address).await);
    }
    let served = tokio::time::timeout(TIMEOUT, fixture.assert_nothing_reached_the_queue()).await;
    assert!(served.is_ok(), "no other connection is accepted");
    let mut byte = [0];
    let read = tokio::time::timeout(Duration::from_millis(1), first.read(&mut byte));
    assert!(read.await.is_err(), "the oldest connection was closed");
}

#[tokio::test]
async fn a_handshake_alone_does_not_authenticate() {
    let mut fixture = start(&certificates()).await;
    let mut silent = Vec::new();
    for _ in 0..UNAUTHENTICATED_MAX / 4 {
        silent.push(fixture.endpoint.connect().await.unwrap());
    }
    tokio::time::pause();
    tokio::time::sleep(MUCH_LATER).await;
    tokio::time::resume();
    let served = tokio::time::timeout(TIMEOUT, fixture.assert_nothing_reached_the_queue()).await;
    assert!(served.is_ok(), "no other connection is accepted");
}

#[tokio::test]
async fn an_authenticated_connection_may_be_silent() {
    start(&certificates()).await.assert_silence_is_allowed().await;
}

#[tokio::test]
async fn bytes_that_are_not_a_handshake_have_no_effect() {
    let mut fixture = start(&certificates()).await;
    let (stream, connection, _outbox) = fixture.admitted().await;
    let preface: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    for bytes in [preface, &[0x16; 4096], &[0x17, 0x03, 0x03, 0xff, 0xff, 0x00], &[0; 70_000]] {
        let mut peer = TcpStream::connect(fixture.address).await.unwrap();
        // The server may close the connection during the write.
        let _ = peer.write_all(bytes).await;
        let _ = peer.read_to_end(&mut Vec::new()).await;
    }
    // The existing stream still works.
    stream.outgoing.send(JoinRequest::Message(WorkerMessage::Leaving)).await.unwrap();
    let leaving = fixture.events.recv().await;
    assert!(
        matches!(
            &leaving,
            Some(ServerEvent::Message { connection: c, message: WorkerMessage::Leaving })
                if *c == connection
        ),
        "{leaving:?}"
    );
    fixture.assert_nothing_reached_the_queue().await;
}
