"""Access control: users, rules, the ACL file and its log, and the ACL command. The server, clients and the HTTP
server import it."""
