#!/bin/sh
# Certificates for a site without cert-manager: one authority, and one certificate each for bridge,
# extender and kube-scheduler. Whoever holds one of the three may call the others.
#
#   manifests/tls/make-certificates.sh FOLDER [DAYS] [NAMESPACE]
#
# Makes FOLDER/{bridge,extender,scheduler}/{tls.crt,tls.key,ca.crt}, and prints the commands that
# make Secrets of them. Run it again to renew (the authority stays): the daemons take changed files
# at the next handshake, without a restart. Needs OpenSSL 3. Keep FOLDER/ca.key safe, or delete it.
set -eu
umask 077

folder=${1:?usage: make-certificates.sh FOLDER [DAYS] [NAMESPACE]}
days=${2:-365}
namespace=${3:-slurmbridge}

ca() {
    test -e "$folder/ca.key" && return
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 \
        -subj "/CN=slurmbridge-ca" -keyout "$folder/ca.key" -out "$folder/ca.crt" \
        -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign,cRLSign
}

certificate() { # name, extended key usage, subject alternative names
    mkdir -p "$folder/$1"
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days "$days" \
        -subj "/CN=slurmbridge-$1" -CA "$folder/ca.crt" -CAkey "$folder/ca.key" \
        -keyout "$folder/$1/tls.key" -out "$folder/$1/tls.crt" \
        -addext basicConstraints=critical,CA:FALSE -addext keyUsage=critical,digitalSignature \
        -addext "extendedKeyUsage=$2" -addext "subjectAltName=$3"
    cp "$folder/ca.crt" "$folder/$1/ca.crt"
}

mkdir -p "$folder"
ca
# 127.0.0.1: `slurmbridge status` inside the bridge's own pod asks there.
certificate bridge serverAuth,clientAuth \
    "DNS:slurmbridge.$namespace.svc,DNS:slurmbridge.$namespace.svc.cluster.local,IP:127.0.0.1"
certificate extender serverAuth,clientAuth \
    "DNS:slurmbridge-extender.$namespace.svc,DNS:slurmbridge-extender.$namespace.svc.cluster.local"
certificate scheduler clientAuth "DNS:slurmbridge-scheduler.$namespace.svc"

secret() { # name of the Secret, folder
    echo "kubectl -n $namespace create secret generic $1" \
        "--from-file=$folder/$2/tls.crt --from-file=$folder/$2/tls.key" \
        "--from-file=$folder/$2/ca.crt --dry-run=client -o yaml | kubectl apply -f -"
}
secret slurmbridge-tls bridge
secret slurmbridge-extender-tls extender
secret slurmbridge-scheduler-tls scheduler
